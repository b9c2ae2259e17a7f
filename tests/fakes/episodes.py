"""Random trajectories over real tokenizers: what a model may say, and what its tools print."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, groupby
from typing import Literal

from hypothesis import strategies as st

from agent_loop.turns.codec import HFCodec, codec_of
from agent_loop.turns.observation_style import inline_glue
from agent_loop.turns.tags import Action, Language
from agent_loop.turns.turn_loop import Budget, Observation, Rollout, run_turns
from tests.fakes.engine import ScriptedGenerate
from tests.fakes.real_tokenizers import CONTROL, KINDS, real_tokenizer

TAGGED = (
    *(
        "<code>1+1</code>",
        "<code>",
        "</code>",
        "<answer>",
        "</answer>",
        "<information>",
        "</information>",
    ),
    *("<", "</", "</co", "ode>", ">", "<answer>7</answer>", "\\boxed{7}"),
)
ANY = ("", "x", "a b", "\n", " ", "\U0001f600", "e\u0301\u0323", "\u4e2d", "\ufffd", "<|im_end|>")
_JSON = (
    *('{"query": "x"}', "{}", '{"a": {"b": [{}]}}', '{"query": "Observation: {"}', '{"query": "'),
    *('{"query": "\\nObservation: "}', '{"query": "\nObservation: "}', "[1]", "12", "NaN", "oops"),
)
REACT = (
    *(f"\nAction: search\nAction Input: {json}" for json in _JSON),
    *("\nThought: a", "\nAction: search", "\nAction Input: {}", "}", '"', "\nFinal Answer: 4"),
    *("\nObservation: y", " Observation:", "Observation:"),
)


TURNS = 4


@dataclass(frozen=True, kw_only=True)
class Episode:
    """What happens in one trajectory."""

    kind: str
    """One of `KINDS`."""

    turns: list[list[int]]
    """Tokens that the model samples if nothing stops it, a list a turn."""

    results: list[str]
    """What the tools print, call by call, again and again."""

    @property
    def codec(self) -> HFCodec:
        return codec_of(real_tokenizer(self.kind))


@st.composite
def episodes(draw: st.DrawFn, pieces: Sequence[str] = TAGGED) -> Episode:
    """Texts of pieces, with tokens between them that no text would be cut into."""
    kind = draw(st.sampled_from(KINDS))
    said, other = st.sampled_from(pieces), st.sampled_from(ANY)
    part = st.one_of(said, said, other, st.integers(0, 255))
    # Most turns act, or few trajectories would have a second one.
    turn = st.builds(
        list.__add__,
        st.lists(part, max_size=5),
        st.sampled_from([[], [pieces[0], pieces[0]], [pieces[0], 9]]),
    )
    printed = st.lists(st.sampled_from(TAGGED + ANY + 4 * CONTROL), max_size=5).map("".join)
    return Episode(
        kind=kind,
        turns=[_tokens(kind, draw(turn)) for _ in range(TURNS)],
        results=[draw(printed), 40 * draw(printed)],
    )


def _tokens(kind: str, parts: Sequence[str | int]) -> list[int]:
    """Texts that stand side by side are tokenised as one."""
    codec = codec_of(real_tokenizer(kind))
    ids: list[int] = []
    for _, run in groupby(parts, key=type):
        same = list(run)
        text = "".join(part for part in same if isinstance(part, str))
        ids += [part for part in same if isinstance(part, int)] + codec.encode(text)
    return ids


def play(
    episode: Episode,
    language: Language,
    budget: Budget,
    stops_at: Literal["token_ids", "texts", "nothing"] = "nothing",
) -> Rollout:
    """The trajectory of an episode; its tools answer in the order of the calls."""
    codec, results = episode.codec, cycle(episode.results)

    async def environment(action: Action) -> Observation:
        return Observation(text=next(results))

    return asyncio.run(
        run_turns(
            prompt_ids=codec.encode("Q"),
            generate=ScriptedGenerate(codec, episode.turns, stops_at),
            environment=environment,
            language=language,
            glue=inline_glue(codec, "<information>", "</information>"),
            codec=codec,
            budget=budget,
            filler_id=min(codec.end_ids),
        )
    )
