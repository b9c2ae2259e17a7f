r"""Can the answer that a prompt asks for earn the reward? Tried before Ray, on a few rows of each
source.

The right answer of a row comes from its ground truth. It is written in the form that the prompt
names (answer tags, `\boxed{}`, `Final Answer:`, `####`), or as a sentence if the prompt names none.
The agent's own code finds the answer in that text, and the source's own reward judges it. A right
answer must earn the full reward, and a wrong one less.

`prompt={}` and the demo model say that the model has learnt its form from examples. Then any form
that the agent reads will do.
"""

import asyncio
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from agent_loop.records.trajectory_record import Call
from agent_loop.rewards import LOOPS_OWN, REWARDS, Reward, reward_for, runs_programs
from agent_loop.rewards.judging import attempt_of
from agent_loop.rewards.terms import with_terms
from agent_loop.row import Row
from agent_loop.toolbox.listing import client_of
from config.compat import timeout
from config.lookup import at
from config.schema import TOOL_CONFIG, PromptConfig, SourceConfig, ToolConfig
from tool_server.wire.protocol import Fault, ToolBackend, ToolCall, ToolResult, ToolUnavailable
from verl_mixed.checks.config.answer_forms import (
    FORMS,
    Reader,
    asks_for_program,
    named_forms,
    reader_of,
    right_answer,
    solution_of,
    written_answer,
    wrong_answers,
)
from verl_mixed.checks.config.data import sampled_rows
from verl_mixed.checks.config.prompts import Prompts, text_of
from verl_mixed.run.sections import section_of

ROWS = 3
"""Rows of each source that are tried."""

VERDICT_S = 10.0
"""Longest time of one verdict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """What the right answer of one row earned."""

    source: str
    place: str
    """File and number of the row."""

    agent: str
    reward: str
    target: str = ""
    """The right answer."""

    form: str = ""
    """Of `FORMS`: how it was written."""

    written: str = ""
    """The model's message."""

    answer: str | None = None
    """What the agent found in it."""

    score: float = 0.0
    wrong: float | None = None
    """The least that a wrong answer earned in the same form; None if none was tried."""

    problem: str = ""
    """Why such rows teach nothing, with a remedy; empty if they teach something."""

    is_doubt: bool = False
    """Whether the problem is a warning, because a reward of the user's own may ask for more than
    the answer."""

    skipped: str = ""
    """Why no answer was tried; empty if one was."""

    NAMES: ClassVar = ("source", "agent", "reward", "written", "found", "right", "earns", "wrong")

    def columns(self) -> list[str]:
        """A line of the table, under `NAMES`; longer texts are cut."""
        if self.skipped:
            return [self.source, self.agent, self.reward, f"not tried: {self.skipped}"] + [""] * 4
        texts = [self.written, "" if self.answer is None else self.answer, self.target]
        numbers = ["" if one is None else f"{one:g}" for one in (self.score, self.wrong)]
        shown = [textwrap.shorten(text, 40, placeholder="...") for text in texts]
        return [self.source, self.agent, self.reward, *shown, *numbers]


_last: list[tuple[Any, list[Example]]] = []
"""The last config that was tried; problems, warnings and notes are asked for one by one."""


def reward_examples(
    config: Mapping[str, Any], *, own_tool_server: bool, asks_judges: bool = False
) -> list[Example]:
    """What right and wrong answers earn, for a few rows of each source.

    Args:
        own_tool_server: the run starts its tool server, so programs run in a sandbox here.
            Otherwise they run at the servers of the config.
        asks_judges: ask the judges of `reward=judge` too, which may cost money.
    """
    if asks_judges or not _last or _last[0][0] is not config:
        _last[:] = [(config, asyncio.run(_examples(config, own_tool_server, asks_judges)))]
    return _last[0][1]


def example_problems(examples: Sequence[Example], *, doubts: bool = False) -> list[str]:
    """The first problem of each source, or its first doubt."""
    first: dict[str, str] = {}
    for each in examples:
        if each.problem and each.is_doubt is doubts:
            first.setdefault(each.source, f"source={each.source!r}: {each.problem}")
    return [*first.values()]


def untried(examples: Sequence[Example]) -> Iterator[str]:
    """The sources of which no answer was tried, each with the reason."""
    tried = {each.source for each in examples if not each.skipped}
    why = {each.source: each.skipped for each in examples if each.source not in tried}
    for name, reason in why.items():
        yield f"the reward of source={name} was not tried: {reason}"


def is_demo_model(config: Mapping[str, Any]) -> bool:
    """Whether the model is in the folder of a demo, which has this note."""
    path = Path(str(at(config, "actor_rollout_ref.model.path"))).expanduser()
    return path.is_absolute() and (path.parent / "demo.json").is_file()


async def _examples(
    config: Mapping[str, Any], own_tool_server: bool, asks_judges: bool
) -> list[Example]:
    tools, _ = section_of(ToolConfig, at(config, TOOL_CONFIG, {}), TOOL_CONFIG)
    prompts, found = Prompts(config), list[Example]()
    if tools is None:
        return []  # another check reports it
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(client_of(tools))
        sandbox = _Sandboxed(at(config, "mixed.tool_server", None) or {})
        stack.callback(sandbox.close)
        for name, rows in sampled_rows(config, ROWS).items():
            source = prompts.sources.get(name)
            if source is None or not source.takes_part:
                continue
            try:
                reward = reward_for(source.reward_name(name), source.reward_options)
            except ValueError:
                continue  # another check reports it
            is_local = own_tool_server and reward.name != "judge"
            trial = _Trial(
                config=config,
                name=name,
                source=source,
                reward=with_terms(reward, source.reward_terms),
                prompts=prompts,
                tools=tools,
                backend=sandbox if is_local else client,
                asks_judges=asks_judges,
            )
            # a program runs against all its hidden tests
            for place, values in rows[:1] if runs_programs(reward.name) else rows:
                others = [_truth(other) for _, other in rows if other is not values]
                found.append(await trial.example(place, values, others))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """Tries the answers of one source."""

    config: Mapping[str, Any]
    name: str
    source: SourceConfig
    reward: Reward
    prompts: Prompts
    tools: ToolConfig
    backend: ToolBackend
    asks_judges: bool

    async def example(
        self, place: str, values: Mapping[str, Any], others: Sequence[str]
    ) -> Example:
        """Try the right answer of a row, and wrong ones.

        Args:
            others: right answers of other rows.
        """
        agent = self.prompts.agent_of(values)
        example = Example(source=self.name, place=place, agent=agent, reward=self.reward.name)
        try:
            messages = self.prompts.of(values)
            row = Row.from_columns({**values, "raw_prompt": messages})
            solution, right = solution_of(row), right_answer(row.ground_truth)
        except (ValueError, TypeError, KeyError):
            return replace(example, skipped="its rows cannot be read")  # another check says why
        if why := self.reward.truth_problem(row.ground_truth):
            return replace(example, skipped=why)  # a problem of the data, which is reported
        if runs_programs(self.reward.name) or right is None:
            right = solution
        reader = self._reader(agent, right)
        if isinstance(reader, str) or right is None:
            return replace(example, skipped=str(reader))
        text = "\n".join(text_of(message["content"]) for message in messages)
        knows_form = self.source.prompt == PromptConfig() or is_demo_model(self.config)
        attempts = _Attempts(
            trial=self,
            row=row,
            agent=agent,
            reader=reader,
            forms=list(reader.own_forms)
            if knows_form or reader.is_program
            else named_forms(text, self.tools),
            calls=int(self.prompts.has_tools(self.name, agent)),
            as_program=right is not solution and asks_for_program(text, self.tools),
        )
        try:
            return await self._tried(replace(example, target=right), attempts, others)
        except _Raised as error:
            words = f"{place}: the right answer gets no verdict: {error}"
            remedy = f"correct the function of mixed.sources.{self.name}.reward"
            return replace(example, problem=f"{words}; {remedy}")
        except Fault as error:
            return replace(example, skipped=f"{error}")

    def _reader(self, agent: str, right: str | None) -> Reader | str:
        """How the agent finds an answer; or why none can be tried."""
        if self.reward.name == LOOPS_OWN:
            return "its agent loop or environment computes the reward"
        if self.reward.name == "judge" and not self.asks_judges:
            return "a model judges; `verl-mixed check --reward-examples` asks it"
        if right is None and runs_programs(self.reward.name):
            return "its rows have hidden tests and no solution"
        if right is None:
            return "its ground truths have no right answer"
        return reader_of(self.config, agent, self.tools)

    async def _tried(
        self, example: Example, attempts: "_Attempts", others: Sequence[str]
    ) -> Example:
        right, key = example.target, f"mixed.sources.{self.name}"
        tried: list[tuple[_Verdict, str]] = []
        for form in attempts.forms:
            tried.append((await attempts.verdict(right, form), form))
            if tried[-1][0].is_full:
                break
        best, form = max(tried, key=lambda each: (each[0].is_full, each[0].score))
        wrongs = [await attempts.verdict(each, form) for each in wrong_answers(right, others)]
        least = min(each.score for each in wrongs)
        example = replace(
            example,
            form=form,
            written=attempts.message(right, form),
            answer=best.answer,
            score=best.score,
            wrong=least,
        )
        if best.is_full and best.score <= least:
            words = f"{example.place}: a wrong answer earns {least:g}, as the right one"
            return replace(example, problem=f"{words}; correct {key}.reward or the rows")
        # What is full for a function of the user's, only the function knows.
        is_theirs = self.reward.name not in REWARDS or self.reward.name == "judge"
        if best.is_full or (is_theirs and best.score > least):
            return example
        floor = least if is_theirs else 1.0
        remedy = await self._remedy(example, attempts, floor)
        compares = "gives that" if is_theirs else f"compares it with {right!r:.80}"
        problem = (
            f"{example.place}: the right answer earns {best.score:g}: the prompt asks for "
            f"{'a program ' if attempts.as_program else 'the answer '}{_WORDS[form]}, so the model "
            f"writes {example.written!r:.120}, agent={example.agent!r} finds {best.answer!r:.120} "
            f"there, and reward={example.reward!r} {compares}"
        )
        last = f"see what {key}.reward wants, and say it in {key}.system_prompt"
        # A solution of public data may be wrong, and a reward may want what no check can guess.
        is_wrong = runs_programs(self.reward.name) and best.answer == right
        is_doubt = is_wrong or (is_theirs and not remedy)
        return replace(example, problem=f"{problem}; {remedy or last}", is_doubt=is_doubt)

    async def _remedy(self, example: Example, attempts: "_Attempts", floor: float) -> str:
        """A prompt, tools or a reward by which the right answer earns everything; empty if none.

        Args:
            floor: a score above it is good enough, beside one that is full.
        """
        right, key = example.target, f"mixed.sources.{self.name}"

        async def earns(attempts: _Attempts, form: str) -> bool:
            verdict = await attempts.verdict(right, form)
            return verdict.is_full or verdict.score > floor

        if await earns(replace(attempts, calls=1), example.form):
            return f"the agent has no tool, and the reward wants a call: set {key}.tools"
        plain = replace(attempts, as_program=False)
        for form in dict.fromkeys([*attempts.forms, *FORMS]):
            if not await earns(plain, form):
                continue
            if attempts.as_program and form in attempts.forms:
                return (
                    f"ask for the answer itself: set prompts=instructed and leave {key}.prompt "
                    "out, because such a prompt follows the reward, or correct the prompt's words"
                )
            return (
                f"ask for the answer {_WORDS[form]}, in {key}.system_prompt for example "
                f"({_ASKS[form]}); prompts=instructed without a {key}.prompt does it for the "
                f"agents of this project ('{key}.prompt={{}}' if the model has learnt a form from "
                "examples)"
            )
        truth, good = attempts.row.ground_truth, list[str]()
        for name in ("math", "qa", "exact_match") if self.reward.name in REWARDS else ():
            reward = reward_for(name)
            if reward.truth_problem(truth) is None:
                other = replace(plain, trial=replace(self, reward=reward))
                good += [name] if await earns(other, example.form) else []
        return f"set {key}.reward={' or '.join(good)}" if good else ""


_WORDS = {
    "tags": "between the answer tags",
    "box": r"in \boxed{}",
    "final": "after `Final Answer:`",
    "hashes": "after ####",
    "sentence": "in no form, in a sentence then",
    "bare": "alone",
}
_ASKS = {
    "tags": "'Write the answer alone between {answer_start_tag} and {answer_end_tag}.'",
    "box": r"'Write the answer in \boxed{}.'",
    "final": "'Write Final Answer: and the answer.'",
    "hashes": "'Write the answer after ####.'",
    "sentence": "'The answer is ...'",
    "bare": "'Write the answer only.'",
}


class _Raised(Exception):
    """The reward has a mistake."""


@dataclass(frozen=True, slots=True)
class _Verdict:
    score: float = 0.0
    is_full: bool = False
    answer: str | None = None
    """What the agent found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempts:
    """Writes answers to one row, and lets them be judged."""

    trial: _Trial
    row: Row
    agent: str
    reader: Reader
    forms: list[str]
    """Those that the prompt names, or that the model may have learnt."""

    as_program: bool
    """Whether the prompt asks for a program, and so gets one that prints the answer."""

    calls: int
    """Calls of tools that the trajectory has."""

    def message(self, answer: str, form: str) -> str:
        said = f"print({answer!r})" if self.as_program else answer
        is_react = form != "final" and "final" in self.reader.own_forms and "final" in self.forms
        return written_answer(
            form,
            said,
            self.trial.tools,
            is_program=self.as_program or runs_programs(self.trial.reward.name),
            after="Final Answer: " if is_react else "",
        )

    async def verdict(self, answer: str, form: str) -> _Verdict:
        """What an answer earns.

        Raises:
            Fault: it cannot be judged here.
            _Raised: the user's own reward raised, or returned no number.
        """
        trial, row = self.trial, self.row
        rollout = await self.reader.read(self.message(answer, form))
        rollout.calls += [Call(turn=1, action="tool", arguments="", status="ok")] * self.calls
        if rollout.fault is not None:
            raise ToolUnavailable(f"its agent failed: {rollout.fault}", tool=self.agent)
        attempt = attempt_of(rollout, row, max_response_length=1 << 30)
        try:
            async with timeout(VERDICT_S):
                parts = await trial.reward.judge(attempt, trial.backend)
        except TimeoutError as error:
            words = f"no verdict within {VERDICT_S:g} s"
            raise ToolUnavailable(words, tool=trial.reward.name) from error
        except Fault:
            raise
        except Exception as error:  # a function of the user's may raise anything
            if isinstance(error.__cause__, OSError) or trial.reward.name in REWARDS:
                raise ToolUnavailable(f"{error}", tool=trial.reward.name) from error
            raise _Raised(str(error)) from error
        task = parts.get("task", parts["score"])
        is_full = parts["acc"] >= 1 and task >= min(1.0, parts["acc"])
        return _Verdict(score=parts["score"], is_full=is_full, answer=rollout.answer)


class _Sandboxed:
    """Runs programs in a sandbox of this process, as the run's own tool server would."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings, self._sandbox = settings, None

    async def call(self, call: ToolCall) -> ToolResult:
        from tool_server.run_code import run_answer  # rarely needed
        from tool_server.sandbox import SandboxUnavailable, choose_sandbox

        if call.tool != "run_code":
            raise ToolUnavailable("the run's own tool server is not started yet", tool=call.tool)
        try:
            if self._sandbox is None:
                self._sandbox = choose_sandbox(
                    self._settings.get("sandbox", "auto"),
                    packages=self._settings.get("sandbox_packages", ()),
                )
            ran = await self._sandbox.run_python(call.payload["code"], call.payload["stdin"])
        except (SandboxUnavailable, ValueError) as error:
            raise ToolUnavailable(str(error), tool=call.tool) from error
        return ToolResult(body=run_answer(ran))

    def close(self) -> None:
        if self._sandbox is not None:
            self._sandbox.close()


def _truth(values: Mapping[str, Any]) -> str:
    """The right answer of another row; empty if it has none."""
    try:
        return right_answer(Row.from_columns(values).ground_truth) or ""
    except (ValueError, TypeError, KeyError):
        return ""
