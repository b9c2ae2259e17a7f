"""A deliberately careless solver of the demo tasks: what the demo model learns from before RL.

It knows how each tool is used but often skips it and guesses, copies a number wrongly, searches for
half a title or forgets `int()`. A model that has learned its habits can do everything that is
needed, and does not do it reliably: that is the gap which RL then closes. The tools are the real
ones, so what the traces show between the markers is what the agent loops will show.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_loop.observations import render_calculation, render_passages, render_run
from agent_loop.tags import Action, ActionKind, Tags
from agent_loop.tools.protocol import ToolBackend, ToolCall
from agent_loop.turn_loop import Observation
from samplers.rows import Row
from samplers.sources import math, nq, taco
from samplers.sources.demo import Task, random_author

TOPK = 2
"""Passages per search, as in config/agent_loops.yaml."""

ACTIONS = {
    taco.SOURCE: (ActionKind.CODE, ActionKind.ANSWER),
    nq.SOURCE: (ActionKind.SEARCH, ActionKind.ANSWER),
    math.SOURCE: (ActionKind.CODE, ActionKind.ANSWER),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """How often the teacher is careless; shares of the occasions, in [0, 1]."""

    skip_tool: float = 0.36
    """math and nq: answers from the top of its head."""

    slip: float = 0.10
    """Copies a number with one digit wrong, or takes the wrong sign."""

    half_title: float = 0.20
    """nq: searches for one word of the title."""

    second_passage: float = 0.08
    """nq: reads the author off the second passage."""

    forget_int: float = 0.40
    """taco: leaves `int()` out of the first draft."""

    test_program: float = 0.40
    """taco: runs the draft before handing it in, and repairs what fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One demonstration: the prompt, then texts of the model and of its tools in turn."""

    question: str
    segments: Sequence[tuple[bool, str]]
    """(written by the model, text), tags and markers included."""


async def act(
    source: str, action: Action, extras: Mapping[str, Any], tools: ToolBackend
) -> Observation:
    """Run one tool call as the agent loop of `source` does, and render its result."""
    if source == nq.SOURCE:
        payload = {"queries": [action.content], "topk": TOPK, "return_scores": True}
        result = await tools.call(ToolCall(tool="retrieve", payload=payload))
        return Observation(text=render_passages(result.body["result"][0]), result=result)
    if source == math.SOURCE:
        call = ToolCall(tool="calculate", payload={"expression": action.content})
        result = await tools.call(call)
        return Observation(text=render_calculation(result.body), result=result)
    payload = {
        "code": action.content,
        "language": "python",
        "stdin": extras.get("example_input", ""),
    }
    result = await tools.call(ToolCall(tool="run_code", payload=payload))
    return Observation(text=render_run(result.body), result=result)


class Teacher:
    """Writes traces; the same seed writes the same ones."""

    def __init__(self, tools: ToolBackend, tags: Tags, seed: int, habits: Habits) -> None:
        self._tools, self._tags, self._habits = tools, tags, habits
        self._rng = random.Random(f"teacher:{seed}")

    async def demonstrate(self, task: Task, row: Row) -> Trace:
        """Solve one task the careless way."""
        solve = {taco.SOURCE: self._taco, nq.SOURCE: self._nq, math.SOURCE: self._math}
        segments: list[tuple[bool, str]] = []

        async def use_tool(kind: ActionKind, content: str) -> str:
            action = Action(kind=kind, content=content)
            observation = await act(row.data_source, action, row.extras, self._tools)
            segments.append((True, self._tagged(kind, content)))
            segments.append((False, with_markers(observation.text, self._tags)))
            return observation.text

        answer = await solve[row.data_source](task, row, use_tool)
        segments.append((True, self._tagged(ActionKind.ANSWER, answer)))
        return Trace(question=row.question, segments=segments)

    async def _math(self, task: Task, row: Row, use_tool: Callable[..., Any]) -> str:
        if self._happens(self._habits.skip_tool):
            return _guess_number(row.ground_truth["answer"], self._rng)
        return self._copied(await use_tool(ActionKind.CODE, self._copied(task.work)))

    async def _nq(self, task: Task, row: Row, use_tool: Callable[..., Any]) -> str:
        if self._happens(self._habits.skip_tool):
            return random_author(self._rng)
        query = task.work
        if self._happens(self._habits.half_title):
            query = self._rng.choice(query.split())
        passages = (await use_tool(ActionKind.SEARCH, query)).splitlines()
        second = len(passages) > 1 and self._happens(self._habits.second_passage)
        return passages[1 if second else 0].rsplit(" by ", 1)[1].rstrip(".")

    async def _taco(self, task: Task, row: Row, use_tool: Callable[..., Any]) -> str:
        program = self._copied(task.work)
        draft = program
        if self._happens(self._habits.forget_int):
            draft = program.replace("int(input())", "input()")
        if self._happens(self._habits.test_program):
            output = await use_tool(ActionKind.CODE, draft)
            return program if "Error" in output else draft
        return draft

    def _copied(self, text: str) -> str:
        """`text`, now and then with one digit or sign wrong."""
        if not self._happens(self._habits.slip):
            return text
        places = [i for i, character in enumerate(text) if character.isdigit() or character in "+*"]
        at = self._rng.choice(places)
        others = "0123456789" if text[at].isdigit() else "+-*"
        wrong = self._rng.choice([character for character in others if character != text[at]])
        return text[:at] + wrong + text[at + 1 :]

    def _happens(self, share: float) -> bool:
        return self._rng.random() < share

    def _tagged(self, kind: ActionKind, content: str) -> str:
        start, end = self._tags.pairs[kind]
        return f"{start}{content}{end}"


def with_markers(text: str, tags: Tags) -> str:
    """A tool's result as it stands in the response, before it is tokenised on its own."""
    return f"{tags.start_state_marker}{text}{tags.end_state_marker}"


def _guess_number(right: str, rng: random.Random) -> str:
    """A number with as many digits; wrong nearly always."""
    digits = len(right.lstrip("-"))
    return str(rng.randint(10 ** (digits - 1), 10**digits - 1))
