"""How a model writes an answer, and how an agent finds it; for the check of rewards.

The agent's own code reads the text. Which code that is, is decided here, because an import of the
agent loops would import verl.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from agent_loop.row import Row
from agent_loop.turns.call_formats import FORMATS
from agent_loop.turns.native import NativeDialogue
from agent_loop.turns.react import ReAct
from agent_loop.turns.tags import ActionKind, Language, Tags, held_answer
from agent_loop.turns.trajectory import StopReason, Trajectory
from agent_loop.turns.turn_loop import Budget, Generated, Rollout, run_turns
from config.gateway import GATEWAY_LOOP
from config.lookup import at
from config.schema import ToolConfig
from tool_server.wire.fenced import extract_code
from verl_mixed.run.sections import (
    DEFAULT_FORMAT,
    FORMAT_KEY,
    NATIVE_LOOP,
    REACT_LOOP,
    SEARCH_LOOP,
    entry_of,
    loaded,
    loop_of,
)

# --- forms of an answer --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Form:
    """A way to write an answer."""

    words: str
    """What a prompt asks for then, after "the answer"."""

    text: str
    """The message; `@` stands for the answer, `<` and `>` for the answer tags."""

    named: re.Pattern[str] | None = None
    """How a prompt names it."""

    asks: str = ""
    """A sentence that asks for it, as a template has it."""


_WHAT = r"(?:answer|name|number|word|letter|option|choice|value|result)s?"
_ALONE = (
    rf"\b(?:only|just)\b[^.\n]{{,40}}\b{_WHAT}\b|\b{_WHAT}\b[^.\n]{{,40}}\b(?:only|alone)\b"
    r"|\bnothing else\b|\bno (?:sentence|explanation|other text)|\b(?:one|single) (?:word|letter)\b"
    r"|\b(?:answer|reply|respond) with\b|\banswer (?:yes|true|A,)|\banswer:\s*$"
    r"|只|仅|\b(?:nur|seulement|solo|sólo|только)\b"
)
TAGS = Form(
    "between the answer tags",
    "<@>",
    asks="Write the answer alone between {answer_start_tag} and {answer_end_tag}.",
)
BOX = Form(
    r"in \boxed{}",
    r"The answer is \boxed{@}.",
    re.compile(r"\\(?:boxed|fbox)\b"),
    r"Write the answer in \boxed{}.",
)
FINAL = Form(
    "after `Final Answer:`",
    "Final Answer: @",
    re.compile("final answer:", re.IGNORECASE),
    "End with a line that begins with Final Answer:",
)
BARE = Form("alone", "@", re.compile(_ALONE, re.IGNORECASE), "Write the answer only.")
SENTENCE = Form("in no form that this check knows; it tries a sentence", "The answer is @.")
EVERY = (
    TAGS,
    BOX,
    Form("after ####", "#### @", re.compile(r"####(?!#)"), "End with #### and the answer."),
    Form(
        "as JSON",
        '{"answer": "@"}',
        re.compile(r"\{\s*\"answer\"\s*:"),
        'Write {"answer": "..."} only.',
    ),
    Form(
        "after `Answer:`",
        "Answer: @",
        re.compile(r"(?<!final )\banswer[*\s]{,3}:", re.IGNORECASE),
        "End with a line that begins with Answer:",
    ),
    FINAL,
    BARE,
    SENTENCE,
)


def named_forms(texts: Sequence[str], tags: tuple[str, str]) -> list[Form]:
    """The forms that each of these prompts names, so not by a word of one question; a sentence if
    there are none."""

    def is_named(form: Form, text: str) -> bool:
        return tags[0] in text if form.named is None else form.named.search(text) is not None

    found = [form for form in EVERY[:-1] if all(is_named(form, text) for text in texts)]
    return found or [SENTENCE]


def written(
    form: Form, answer: str, tags: tuple[str, str], *, is_program: bool = False, before: str = ""
) -> str:
    """The model's message.

    Args:
        is_program: whether the answer is a program, which a sentence has in a fence.
        before: what stands before any form, as ReAct's `Final Answer: `.
    """
    if form is SENTENCE and is_program:
        return f"{before}This program passes:\n```python\n{answer}\n```"
    if form is SENTENCE and re.search(r"[\\^_{=]", answer):
        answer = f"${answer}$"  # as models write LaTeX
    parts = {"@": answer, "<": tags[0], ">": tags[1]}
    return before + re.sub("[@<>]", lambda found: parts[found[0]], form.text)


_PROGRAM = re.compile(
    r"\b(?:the|your|all of the|(?:a|complete|whole|full|final|python|source)\b)\s+"
    r"(?:(?:complete|whole|full|final|python|source|corrected)\s+)*(?:program|code|function|script)"
    r"\s*(?:alone|itself)?\s*(?:between|in|inside|within|into|to)?\s*$",
    re.IGNORECASE,
)
_PRODUCT = re.compile(
    r"\b(?:of|by|from|for)\s+(?:the|your)\b"
    r"|\b(?:results?|outputs?|prints|printed|returns|returned|values?)\b",
    re.IGNORECASE,
)
_IT = re.compile(r"\b(?:write|put|give|return|place)\s+(?:all of )?it\b[^.]*$", re.IGNORECASE)
_NOUN = re.compile(r"\b(program|code|function|script|answer|result|number|value|name)s?\b", re.I)


def asks_for_program(texts: Sequence[str], tags: tuple[str, str]) -> bool:
    """Whether each of these prompts wants a program between the answer tags.

    Such a sentence has the program right before the tag ("then the program between <answer>"), or
    before an `it` ("When your program is right, write all of it between <answer>").
    """

    def asks(text: str) -> bool:
        for sentence in re.split(r"(?<=[.!?])\s|\n", text):
            before, tag, _ = sentence.partition(tags[0])
            clause = re.split(r"[,;:]|\band\b", re.sub(r"<[^<>\s]*>", "", before))[-1]
            if not tag or _PRODUCT.search(clause):
                continue
            nouns = _NOUN.findall(before)
            is_it = _IT.search(clause) and nouns and nouns[-1].lower() in ("program", "script")
            if is_it or _PROGRAM.search(clause):
                return True
        return False

    return all(map(asks, texts))


# --- right and wrong answers ---------------------------------------------------------------------

_MOST = 3
_SOLUTIONS = ("solution", "solutions", "canonical_solution")
"""Fields of a row that may hold programs which pass the row's hidden tests."""

_TRUTHS = frozenset(
    (
        *("answer", "target", "inputs", "outputs", "fn_name", "outputs_wrapped"),
        *("entry", "task", "config", "style"),
    )
)
"""Keys of the ground truths of this project's rows; beside others, `target` may be a part."""


def right_answers(truth: Any) -> list[str]:
    """Accepted answers of a ground truth, up to three; none if it holds none for certain."""
    if isinstance(truth, Mapping):
        entry = truth.get("entry")
        given = entry.get("answer") if isinstance(entry, Mapping) else None
        given = truth.get("target", truth.get("answer", given))
        truth = given if truth.keys() <= _TRUTHS else None
    several = truth if isinstance(truth, list) else [truth]
    texts = [str(each).strip() for each in several[:_MOST] if isinstance(each, str | int | float)]
    return [text for text in texts if text]


def solutions_of(row: Row) -> list[str]:
    """Programs of a row that pass its hidden tests, the shortest three."""
    for fields in (row.extras, row.extra_info):
        for name in _SOLUTIONS:
            given = fields.get(name)
            if isinstance(given, str) and given.lstrip().startswith("["):
                with suppress(ValueError):
                    given = json.loads(given)
            several: list[Any] = given if isinstance(given, list) else [given]
            texts = [extract_code(each, "python") for each in several if isinstance(each, str)]
            if texts := [text for text in texts if text.strip()]:
                return sorted(texts, key=len)[:_MOST]
    return []


def wrong_answers(right: str, others: Iterable[str]) -> list[str]:
    """Two answers that are certainly wrong: of numbers other numbers, of texts that of another row
    and one that no row has."""
    plain = right.replace(",", "")
    if re.fullmatch(r"[+-]?\d{1,20}(\.\d{1,20})?(/[1-9]\d{,20})?", plain):
        return [str(Fraction(plain) + 1), str(Fraction(plain) * 3 + 17)]
    known = _letters(right)
    other = next((each for each in others if _letters(each) not in ("", known)), "no idea")
    return [other, "nothing of the kind"]


def _letters(text: str) -> str:
    return re.sub(r"\W", "", text).casefold()


# --- agents --------------------------------------------------------------------------------------

_MATH_LOOP = "agent_loop.math_agent_loop.MathAgentLoop"
ACTIONS: Mapping[str, Sequence[str]] = {
    "agent_loop.code_execution_agent_loop.CodeExecutionAgentLoop": ("code", "answer"),
    SEARCH_LOOP: ("search", "answer"),
    _MATH_LOOP: ("code", "answer"),
}
"""Class of an agent loop with tags -> its `actions`."""

_OVERRIDES = ("language", "dialogue", "converse", "conversations", "run")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """The way in which an agent finds the answer in a message."""

    language: Language | None = None
    """None: the agent is another project's, or a program behind the gateway."""

    tags: tuple[str, str]
    """Around the answer."""

    is_program: bool = False
    """Whether a program behind the gateway hands over the answer, in a form of its own."""

    own_forms: Sequence[Form]
    """The forms that it reads, for a model that has learnt one of them."""

    async def read(self, message: str) -> Rollout:
        """The rollout that ends with this message."""
        if self.language is not None:
            return await _run(message, self.language)
        tags = Tags(pairs={ActionKind.ANSWER: self.tags})
        held = None if self.is_program else held_answer(message, tags)
        rollout = Rollout(
            trajectory=Trajectory([0]), stop_reason=StopReason.ANSWERED, answer=held or message
        )
        rollout.answer_is_message = held is None
        rollout.trajectory.add_model_tokens([0], [0.0])
        rollout.trajectory.cut_turn(1, message)
        return rollout


def reader_of(config: Mapping[str, Any], agent: str, tools: ToolConfig) -> Reader | str:
    """The way in which an agent finds an answer; or why no answer can be tried."""
    entry = entry_of(config, agent)
    loop, target = loop_of(entry), str(entry.get("_target_"))
    tags = (tools.answer_start_tag, tools.answer_end_tag)
    if loop == "agent_loop.environment_agent_loop.EnvironmentAgentLoop":
        return "its environment rewards steps"
    if loop == GATEWAY_LOOP:
        return Reader(tags=tags, is_program=True, own_forms=(BARE,))
    if entry and not loop and loaded(target)[0] is None:
        return "its agent loop cannot be imported"
    if not loop.startswith("agent_loop."):
        return Reader(tags=tags, own_forms=(BARE, *EVERY))
    if target != loop:  # a class of the user's
        return _reader_of_class(target, tools)
    if loop in ACTIONS:
        is_boxed = loop == _MATH_LOOP
        language: Language = Tags.from_config(tools, ACTIONS[loop], answer_boxed=is_boxed)
        return Reader(language=language, tags=tags, own_forms=(TAGS, BOX) if is_boxed else (TAGS,))
    if loop == REACT_LOOP:
        return Reader(language=ReAct(), tags=tags, own_forms=(FINAL,))
    if loop == NATIVE_LOOP:
        call_format = FORMATS.get(str(at(config, FORMAT_KEY)), FORMATS[DEFAULT_FORMAT])
        unused: Any = None  # the template and the tokenizer, which only results of calls need
        around = Tags(pairs={ActionKind.ANSWER: tags})
        dialogue = NativeDialogue(call_format, {}, unused, unused, around, max_calls=1)
        return Reader(language=dialogue, tags=tags, own_forms=(BARE, *EVERY))
    return f"{target} reads a language of its own"


def _reader_of_class(target: str, tools: ToolConfig) -> Reader | str:
    """As `reader_of`, of a class that inherits from `TaggedAgentLoop` and changes its tags only."""
    made: Any = loaded(target)[0]
    bases = {base.__name__: base for base in made.__mro__}
    if (tagged := bases.get("TaggedAgentLoop")) is None or any(
        getattr(made, name) is not getattr(tagged, name) for name in _OVERRIDES
    ):
        return f"{target} reads a language of its own"
    try:
        own = Tags.from_config(tools, made.actions, made.own_tags, answer_boxed=made.answer_boxed)
        return Reader(language=own, tags=own.pairs[ActionKind.ANSWER], own_forms=(TAGS, BOX))
    except (TypeError, AttributeError, KeyError):
        return f"{target} makes its tags when it runs"


class _Characters:
    """A codec whose tokens are characters; the character 0 ends a message."""

    end_ids = frozenset([0])

    def encode(self, text: str) -> list[int]:
        return [*map(ord, text)]

    encode_plain = encode

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, filter(None, token_ids)))


async def _run(message: str, language: Language) -> Rollout:
    """What the turn loop makes of this message."""
    codec, unused = _Characters(), None

    async def generate(*_: Any, **__: Any) -> Generated:
        token_ids = [*codec.encode(message), 0]
        return Generated(token_ids=token_ids, log_probs=[0.0] * len(token_ids))

    return await run_turns(
        prompt_ids=[0],
        generate=generate,
        environment=unused,  # pyright: ignore[reportArgumentType]: it is the last turn
        language=language,
        glue=unused,  # pyright: ignore[reportArgumentType]: as above
        codec=codec,
        budget=Budget(max_turns=1, response_length=1 << 30),
        filler_id=0,
    )
