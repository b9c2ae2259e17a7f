r"""How an answer is written, and how an agent finds it in what the model wrote.

For the check of rewards. The agent's own code reads the text; only which code that is, is decided
here, because the classes of agent loops would import verl.
"""

import json
import re
from collections.abc import Mapping, Sequence
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

ACTIONS: Mapping[str, Sequence[str]] = {
    "agent_loop.code_execution_agent_loop.CodeExecutionAgentLoop": ("code", "answer"),
    SEARCH_LOOP: ("search", "answer"),
    "agent_loop.math_agent_loop.MathAgentLoop": ("code", "answer"),
}
"""Class of an agent loop -> its `actions`."""

_BOXED = ("agent_loop.math_agent_loop.MathAgentLoop",)
_TAGGED = "agent_loop.turn_agent_loop.TaggedAgentLoop"
_ENVIRONMENT = "agent_loop.environment_agent_loop.EnvironmentAgentLoop"

FORMS: Mapping[str, str] = {
    "tags": "{start}{answer}{end}",
    "box": r"The answer is \boxed{{{answer}}}.",
    "final": "Final Answer: {answer}",
    "hashes": "The answer follows.\n#### {answer}",
    "sentence": "The answer is {answer}.",
    "bare": "{answer}",
}
"""Ways to write an answer."""

_WHAT = r"(?:answer|name|number|word|letter|option|choice|value|result)s?"
_NAMES = {
    "box": re.compile(r"\\(?:boxed|fbox)\b"),
    "final": re.compile("Final Answer:"),
    "hashes": re.compile("####"),
    "bare": re.compile(
        rf"\b(?:only|just)\b[^.\n]{{,40}}\b{_WHAT}\b|\b{_WHAT}\b[^.\n]{{,40}}\b(?:only|alone)\b"
        r"|\bnothing else\b|\bno (?:sentence|explanation)|\b(?:one|single) (?:word|letter)\b",
        re.IGNORECASE,
    ),
}
"""Form -> how a prompt names it; the tags are those of `tool_config`."""

_SOLUTIONS = ("solution", "solutions", "canonical_solution")
"""Fields of a row that may hold a program which passes the row's hidden tests."""

_NO_PROGRAM = ("answer", "result", "number", "value", "name", "expression")
_NOUN = re.compile(rf"\b(program|code|function|script|{'|'.join(_NO_PROGRAM)})s?\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """The way in which an agent finds the answer in a message."""

    language: Language | None = None
    """None: the agent is another project's, or a program behind the gateway."""

    tags: Tags
    """The answer tags, for agents without a language."""

    is_program: bool = False
    """Whether a program behind the gateway hands over the answer, in a form of its own."""

    own_forms: tuple[str, ...]
    """The forms that it reads, for a model that has learnt one of them."""

    async def read(self, written: str) -> Rollout:
        """The rollout that ends with this message."""
        if self.language is not None:
            return await _run(written, self.language)
        held = None if self.is_program else held_answer(written, self.tags)
        rollout = Rollout(
            trajectory=Trajectory([0]), stop_reason=StopReason.ANSWERED, answer=held or written
        )
        rollout.answer_is_message = held is None
        rollout.trajectory.add_model_tokens([0], [0.0])
        rollout.trajectory.cut_turn(1, written)
        return rollout


def reader_of(config: Mapping[str, Any], agent: str, tools: ToolConfig) -> Reader | str:
    """The way in which an agent finds an answer; or why no answer can be tried."""
    entry = entry_of(config, agent)
    loop, target = loop_of(entry), str(entry.get("_target_"))
    tags = Tags.from_config(tools, [ActionKind.ANSWER])
    if loop == _ENVIRONMENT:
        return "its environment rewards steps"
    if loop == GATEWAY_LOOP:
        return Reader(tags=tags, is_program=True, own_forms=("bare",))
    if loop == REACT_LOOP:
        return Reader(language=ReAct(), tags=tags, own_forms=("final",))
    if loop == NATIVE_LOOP:
        call_format = FORMATS.get(str(at(config, FORMAT_KEY)), FORMATS[DEFAULT_FORMAT])
        nothing: Any = None  # only results of calls need a template and a tokenizer
        language = NativeDialogue(call_format, {}, nothing, nothing, tags, max_calls=1)
        return Reader(language=language, tags=tags, own_forms=("bare", *FORMS))
    if loop in ACTIONS:
        is_boxed = loop in _BOXED
        language = Tags.from_config(tools, ACTIONS[loop], answer_boxed=is_boxed)
        own_forms = ("tags", "box") if is_boxed else ("tags",)
        return Reader(language=language, tags=tags, own_forms=own_forms)
    if loop == _TAGGED:
        made: Any = loaded(target)[0]
        if made.language.__qualname__ != "TaggedAgentLoop.language":
            return f"{target} reads a language of its own"
        own = Tags.from_config(tools, made.actions, made.own_tags, answer_boxed=made.answer_boxed)
        return Reader(language=own, tags=tags, own_forms=("tags", "box"))
    if loop.startswith("agent_loop."):
        return f"{target} reads a language of its own"
    return Reader(tags=tags, own_forms=("bare", *FORMS))


class _Characters:
    """A codec whose tokens are characters; the character 0 ends a message."""

    end_ids = frozenset([0])

    def encode(self, text: str) -> list[int]:
        return [*map(ord, text)]

    encode_plain = encode

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, filter(None, token_ids)))


async def _run(written: str, language: Language) -> Rollout:
    """What the turn loop makes of this message."""
    codec, nothing = _Characters(), None

    async def generate(*_: Any, **__: Any) -> Generated:
        token_ids = [*codec.encode(written), 0]
        return Generated(token_ids=token_ids, log_probs=[0.0] * len(token_ids))

    return await run_turns(
        prompt_ids=[0],
        generate=generate,
        environment=nothing,  # pyright: ignore[reportArgumentType]: it is the only turn
        language=language,
        style=nothing,  # pyright: ignore[reportArgumentType]: as above
        codec=codec,
        budget=Budget(max_turns=1, response_length=1 << 30),
        filler_id=0,
    )


def named_forms(text: str, tools: ToolConfig) -> list[str]:
    """The forms that a prompt names; a sentence if it names none."""
    found = ["tags"] if tools.answer_start_tag in text else []
    found += [form for form, name in _NAMES.items() if name.search(text)]
    return found or ["sentence"]


def written_answer(
    form: str, answer: str, tools: ToolConfig, *, is_program: bool = False, after: str = ""
) -> str:
    """The message in which the model answers.

    Args:
        is_program: whether the answer is a program, which a sentence has in a fence.
        after: what goes before the answer in any form, as ReAct's `Final Answer: `.
    """
    if form == "sentence" and is_program:
        answer = f"this program:\n```python\n{answer}\n```\nIt passes"
    elif form == "sentence" and re.search(r"[\\^_{=]", answer):
        answer = f"${answer}$"  # as models write LaTeX
    start, end = tools.answer_start_tag, tools.answer_end_tag
    return after + FORMS[form].format(answer=answer, start=start, end=end)


def asks_for_program(text: str, tools: ToolConfig) -> bool:
    """Whether a prompt wants a program between the answer tags.

    The last noun before the tag tells: in its own clause, or before that if the clause has `it`
    only, as in "When your program is right, write all of it between <answer> and </answer>".
    """
    for sentence in re.split(r"(?<=[.!?])\s|\n", text):
        before, tag, _ = sentence.partition(tools.answer_start_tag)
        before = re.sub(r"<[^<>\s]*>", "", before)
        clause = re.split(r"[,;:]|\b(?:and|then)\b", before)[-1]
        nouns = _NOUN.findall(before if re.search(r"\bit\b", clause) else clause)
        if tag and nouns and nouns[-1].lower() not in _NO_PROGRAM:
            return True
    return False


def right_answer(truth: Any) -> str | None:
    """The right answer of a ground truth, the first of several; None if it has none."""
    if isinstance(truth, Mapping):
        entry = truth.get("entry")
        given = entry.get("answer") if isinstance(entry, Mapping) else None
        truth = truth.get("target", truth.get("answer", given))
    if isinstance(truth, list):
        truth = truth[0] if truth else None
    is_text = isinstance(truth, str | int | float)
    return str(truth).strip() or None if is_text else None


def solution_of(row: Row) -> str | None:
    """A program of the row that passes its hidden tests; the shortest of several."""
    for fields in (row.extras, row.extra_info):
        for name in _SOLUTIONS:
            given = fields.get(name)
            if isinstance(given, str) and given.lstrip().startswith("["):
                with suppress(ValueError):
                    given = json.loads(given)
            several: list[Any] = given if isinstance(given, list) else [given]
            if texts := [each for each in several if isinstance(each, str) and each.strip()]:
                return min(texts, key=len)
    return None


def wrong_answers(right: str, others: Sequence[str]) -> list[str]:
    """Two answers that are certainly wrong: of numbers other numbers, of texts that of another row
    and one that no row has."""
    try:
        number = Fraction(right.replace(",", ""))
    except (ValueError, ZeroDivisionError):
        plain = _letters(right)
        other = next((each for each in others if _letters(each) not in ("", plain)), "no idea")
        return [other, "nothing of the kind"]
    return [str(number + 1), str(number * 3 + 17)]


def _letters(text: str) -> str:
    return re.sub(r"\W", "", text).casefold()
