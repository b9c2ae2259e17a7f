"""The teacher of the demo model: worked examples with deliberate mistakes.

The teacher uses the tags, calls the tools and copies their results. About half of its examples skip
the tool, use a wrong operand or copy a wrong digit. So the model knows how to solve the tasks but
does not do so reliably, which reinforcement learning can improve. Nothing here knows an answer that
is not in the data.
"""

import json
import random
from dataclasses import dataclass
from typing import Any

from agent_loop.tool_actions import render_passages
from config.schema import ToolConfig
from samplers.rows.sources import KINDS
from samplers.rows.sources.demo import DemoData, Task
from tool_server import calculator
from tool_server.search import PassageIndex
from verl_mixed.demo.forms import TOPK, forms_of
from verl_mixed.demo.recipe import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A worked example."""

    messages: list[dict[str, Any]]
    """Of the prompt."""

    tools: list[dict[str, Any]] | None
    """Schemas of tools that the chat template shows."""

    parts: list[tuple[bool, str]]
    """(whether the model writes it, text), in order; tools write the other parts."""


class Teacher:
    """Solves tasks, in a share of them with a mistake.

    Args:
        data: the demo.
        config: tags, for the sources with tags.
        index: search over the demo's corpus.
        recipe: says how often the teacher makes no mistake.
    """

    def __init__(
        self, data: DemoData, config: ToolConfig, index: PassageIndex, recipe: Recipe
    ) -> None:
        self.data, self.index, self.recipe = data, index, recipe
        self.forms = forms_of(recipe.forms, config)
        self.authors = sorted({task.record["answer"][0] for task in data.train["nq"]})

    def trace(self, source: str, task: Task, rng: random.Random) -> Trace:
        """Solve one task."""
        careful = rng.random() < self.recipe.careful[source]
        make = {"math": self._math, "nq": self._nq, "taco": self._taco}[source]
        question = KINDS[source].to_row(task.record, split="train", index=0).question
        messages, tools = self.forms[source].messages(question)
        return Trace(messages=messages, tools=tools, parts=make(task, careful, rng))

    def _answer(self, source: str, text: str) -> tuple[bool, str]:
        return True, self.forms[source].answer(text)

    def _call(self, source: str, argument: str, result: str) -> list[tuple[bool, str]]:
        form = self.forms[source]
        return [(True, form.call(argument)), (False, form.result(result))]

    def _math(self, task: Task, careful: bool, rng: random.Random) -> list[tuple[bool, str]]:
        work, answer = task.work, calculator.calculate(task.work)
        slip = None if careful else rng.choice(["guess", "guess", "operand", "sign", "copy"])
        if slip == "guess":
            return [self._answer("math", _other_number(answer, rng))]
        if slip == "operand":
            work = _slip_digit(work, rng)
        elif slip == "sign":
            old = next(sign for sign in "*+-" if sign in work)
            work = work.replace(old, rng.choice([s for s in "*+-" if s != old]), 1)
        result = calculator.calculate(work)
        shown = _slip_digit(result, rng) if slip == "copy" else result
        return [*self._call("math", work, result), self._answer("math", shown)]

    def _nq(self, task: Task, careful: bool, rng: random.Random) -> list[tuple[bool, str]]:
        answer = task.record["answer"][0]
        slip = None if careful else rng.choice(["guess", "guess", "query", "passage"])
        if slip == "guess":
            return [self._answer("nq", rng.choice(self.authors))]
        query = rng.choice(task.work.split()) if slip == "query" else task.work
        found = self.index.search(query, TOPK)
        text = render_passages([{"document": {"contents": p.contents}} for p in found])
        if slip in ("query", "passage"):
            answer = _author(rng.choice(found).contents)
            if slip == "passage":
                answer = _author(found[-1].contents)
        return [*self._call("nq", query, text), self._answer("nq", answer)]

    def _taco(self, task: Task, careful: bool, rng: random.Random) -> list[tuple[bool, str]]:
        slip = None if careful else rng.choice(["int", "int", "constant", "sign"])
        program = task.work
        if slip == "int":
            program = program.replace("int(input())", "input()")
        elif slip == "constant":
            program = _slip_digit(program, rng)
        elif slip == "sign":
            old = next(sign for sign in "%*+-" if sign in program)
            program = program.replace(old, rng.choice([s for s in "*+-" if s != old]), 1)
        parts = [self._answer("taco", program)]
        if rng.random() < 0.25:
            parts = [*self._call("taco", program, self._output(task, program)), *parts]
        return parts

    def _output(self, task: Task, program: str) -> str:
        """What a program of the teacher prints for the example. All of them print one sum."""
        example = json.loads(task.record["input_output"])["inputs"][0].strip()
        inner = program.removeprefix("print(").removesuffix(")")
        if "int(" not in inner:
            return 'TypeError: can only concatenate str (not "int") to str'
        return calculator.calculate(inner.replace("int(input())", example))


def _author(contents: str) -> str:
    return contents.rsplit(" by ", 1)[1].rstrip(".")


def _other_number(text: str, rng: random.Random) -> str:
    digits = [d for d in text if d.isdigit()]
    return "".join([rng.choice("123456789"), *[rng.choice("0123456789") for _ in digits[1:]]])


def _slip_digit(text: str, rng: random.Random) -> str:
    """The text with one digit replaced by another. A number does not get a leading 0."""
    places = [i for i, character in enumerate(text) if character.isdigit()]
    at = rng.choice(places)
    first = at == 0 or not text[at - 1].isdigit()
    choices = [d for d in ("123456789" if first else "0123456789") if d != text[at]]
    return text[:at] + rng.choice(choices) + text[at + 1 :]
