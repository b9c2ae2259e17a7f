"""The trajectory is the same whether the engine stops at tokens, at texts, or not at all."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.turn_agent_loop import _Engine
from agent_loop.turns.react import ReAct
from agent_loop.turns.tags import ActionKind, Language, Tags
from agent_loop.turns.turn_loop import Budget, Stop
from config.schema import ToolConfig
from tests.fakes.episodes import REACT, TAGGED, Episode, episodes, play

KINDS = (ActionKind.CODE, ActionKind.ANSWER)
CONFIG = ToolConfig(server_url="http://127.0.0.1:1")
LONG = Budget(max_turns=4, response_length=100_000)


def assert_same_from_all_engines(episode: Episode, language: Language) -> None:
    seen = []
    for stops_at in ("token_ids", "texts", "nothing"):
        rollout = play(episode, language, LONG, stops_at)
        assert rollout.loop_error is None
        t = rollout.trajectory
        tokens = [t.response_ids, t.response_mask, t.log_probs]
        seen.append([*tokens, rollout.answer, rollout.stop_reason, len(rollout.calls)])
    assert seen[0] == seen[2]
    assert seen[1] == seen[2]


@pytest.mark.parametrize("most", [1, 3])
@given(episode=episodes(TAGGED), boxed=st.booleans())
def test_with_tags(most, episode, boxed):
    tags = Tags.from_config(CONFIG, KINDS, max_actions=most, answer_boxed=boxed)
    assert_same_from_all_engines(episode, tags)


@pytest.mark.parametrize("most", [1, 3])
@given(episode=episodes(REACT))
def test_with_react(most, episode):
    assert_same_from_all_engines(episode, ReAct(max_actions=most))


IDS, TEXTS = {"stop_token_ids"}, {"stop", "include_stop_str_in_output"}


@pytest.mark.parametrize(
    ("backend", "how", "names"),
    [
        ("vllm", "auto", IDS | TEXTS),
        ("vllm", "after", set()),
        # SGLang's parameters have other names for stop strings, and it refuses unknown ones
        ("sglang", "auto", IDS),
        ("sglang", "token_ids", IDS),
        ("sglang", "after", set()),
    ],
)
async def test_an_engine_is_sent_only_stops_that_it_takes(backend, how, names):
    sent: dict[str, Any] = {}

    async def generate(*, request_id, prompt_ids, sampling_params):
        sent.update(sampling_params)
        return SimpleNamespace(token_ids=[1], log_probs=[0.0], extra_fields={})

    settings = SimpleNamespace(
        backend=backend, mixed=SimpleNamespace(turns=SimpleNamespace(stop_at_tag=how))
    )
    loop = SimpleNamespace(server_manager=SimpleNamespace(generate=generate), settings=settings)
    stop = Stop(token_ids=(7,), texts=("</code>",))

    engine = _Engine(cast(Any, loop), {"temperature": 1.0})
    await engine.generate([1], max_tokens=4, stop=stop, request_id="c")

    assert sent.keys() == {"temperature", "max_tokens"} | names
