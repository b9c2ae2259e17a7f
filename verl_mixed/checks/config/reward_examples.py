"""Can the answer that a prompt asks for earn the reward? Tried before Ray, on three rows of each
source.

The right answer of a row comes from its ground truth. It is written in the form that the prompt
names (answer tags, a box, `Final Answer:`, `####`), or as a sentence if the prompt names none. The
agent's own code finds the answer in that text, and the source's own reward judges it. A right
answer must earn the full reward, and a wrong one less.

`prompt={}` and the demo model say that the model has learnt its form from examples. Then any form
that the agent reads will do.
"""

import asyncio
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from itertools import groupby
from math import inf
from pathlib import Path
from typing import Any, ClassVar

from agent_loop.records.trajectory_record import Call
from agent_loop.rewards.attempt import Reward
from agent_loop.rewards.judging import attempt_of
from agent_loop.rewards.registry import reward_for, runs_programs
from agent_loop.rewards.terms import with_terms
from agent_loop.row import Row
from agent_loop.toolbox.listing import client_of
from config.compat import timeout
from config.lookup import at
from config.schema import (
    LOOPS_OWN,
    TOOL_CONFIG,
    PromptConfig,
    SourceConfig,
    ToolConfig,
    template_names,
)
from tool_server.wire.protocol import Fault, ToolBackend, ToolCall, ToolResult, ToolUnavailable
from verl_mixed.checks.config.answer_forms import (
    ACTIONS,
    EVERY,
    FINAL,
    SENTENCE,
    Form,
    Reader,
    asks_for_program,
    named_forms,
    reader_of,
    right_answers,
    solutions_of,
    written,
    wrong_answers,
)
from verl_mixed.checks.config.data import sampled_rows
from verl_mixed.checks.config.prompts import Prompts, text_of
from verl_mixed.run.sections import NATIVE_LOOP, entry_of, loop_of, section_of

ROWS = 3
"""Rows of each source, and of each agent that its rows name."""

_TURNS = TOOL_CONFIG.rpartition(".")[0]


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

    written: str = ""
    """The model's message."""

    answer: str | None = None
    """What the agent found in it."""

    score: float = 0.0
    wrong: float | None = None
    """The least that a wrong answer earned in the same form; None if none was tried."""

    problem: str = ""
    """Why such a row teaches nothing, with a remedy; empty if it teaches something."""

    is_doubt: bool = False
    """Whether the problem is a warning: most rows are good, or a function of the user's may want
    more than the answer."""

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
    if not asks_judges and _last and _last[0][0] is config:
        return _last[0][1]
    tools, _ = section_of(ToolConfig, at(config, TOOL_CONFIG, {}), TOOL_CONFIG)
    found: list[Example] = []
    if tools is not None:  # another check reports it
        prompts, rows = Prompts(config), sampled_rows(config, ROWS)
        groups = [
            _Group.of(config, name, agent, [*some], prompts, tools)
            for name, of_source in rows.items()
            for agent, some in groupby(of_source, lambda each: prompts.agent_of(each[1]))
        ]
        found = asyncio.run(_examples(groups, config, tools, own_tool_server, asks_judges))
    _last[:] = [(config, found)]
    return found


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
    groups: Sequence["_Group | None"],
    config: Mapping[str, Any],
    tools: ToolConfig,
    own_tool_server: bool,
    asks_judges: bool,
) -> list[Example]:
    found: list[Example] = []
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(client_of(tools))
        sandbox = _Sandboxed(at(config, "mixed.tool_server", None) or {})
        stack.callback(sandbox.close)
        for group in filter(None, groups):
            is_local = own_tool_server and group.reward.name != "judge"
            found += await group.examples(sandbox if is_local else client, asks_judges)
    return found


@dataclass(frozen=True, slots=True)
class _Verdict:
    score: float = -inf
    is_full: bool = False
    answer: str | None = None
    """What the agent found."""

    raised: BaseException | None = None
    """What the user's own reward raised in place of a verdict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """The rows of a source that have one agent."""

    name: str
    agent: str
    reward: Reward
    rows: list[tuple[str, Row]]
    reader: Reader | str
    """Or why no answer can be tried."""

    forms: Sequence[Form]
    """Those that the prompts name, or that the model may have learnt."""

    as_program: bool
    """Whether the prompts ask for a program, and so get one that prints the answer."""

    calls: int
    """Calls of tools that a trajectory has."""

    has_template: bool
    """Whether `prompts=instructed` has a template that the source does not take yet."""

    verdict_s: float
    """Longest time of one verdict, as in the run: a busy machine is slow, and no answer is."""

    @classmethod
    def of(
        cls,
        config: Mapping[str, Any],
        name: str,
        agent: str,
        rows: Sequence[tuple[str, Mapping[str, Any]]],
        prompts: Prompts,
        tools: ToolConfig,
    ) -> "_Group | None":
        """The group; None if another check reports its source or all of its rows."""
        source: SourceConfig = prompts.sources[name]
        try:
            reward = reward_for(source.reward_name(name), source.reward_options)
        except ValueError:
            return None
        read: list[tuple[str, Row]] = []
        for place, values in rows:
            row = Row.from_columns({**values, "raw_prompt": prompts.of(values)})
            try:
                problem = reward.truth_problem(row.ground_truth)
            except (ValueError, TypeError, KeyError):
                continue
            read += [(place, row)] if problem is None else []
        if not read:
            return None
        reader = reader_of(config, agent, tools)
        tags = (tools.answer_start_tag, tools.answer_end_tag)
        tags = reader.tags if isinstance(reader, Reader) else tags
        texts = ["\n".join(text_of(each["content"]) for each in row.messages) for _, row in read]
        forms: Sequence[Form] = named_forms(texts, tags)
        knows_form = source.prompt == PromptConfig() or is_demo_model(config)
        if isinstance(reader, Reader) and (knows_form or reader.is_program):
            forms = reader.own_forms
        loop = loop_of(entry_of(config, agent))
        turns = source.max_turns or at(config, f"{_TURNS}.max_assistant_turns")
        has_one = not prompts.library.keys().isdisjoint(template_names(name, source, agent))
        return cls(
            name=name,
            agent=agent,
            reward=with_terms(reward, source.reward_terms),
            rows=read,
            reader=reader,
            forms=forms,
            as_program=asks_for_program(texts, tags),
            calls=int(prompts.has_tools(name, agent) and turns != 1),
            has_template=(loop in ACTIONS or loop == NATIVE_LOOP)
            and not (source.prompt is None and has_one),
            verdict_s=at(config, "mixed.deadlines.reward_s"),
        )

    @property
    def is_theirs(self) -> bool:
        """Whether only the user's own reward knows what its full score is."""
        return ":" in self.reward.name or self.reward.name == "judge"

    async def examples(self, backend: ToolBackend, asks_judges: bool) -> list[Example]:
        """Try the rows. What cannot be judged once is not asked again."""
        found: list[Example] = []
        # A program runs against all its hidden tests.
        for place, row in self.rows[:1] if runs_programs(self.reward.name) else self.rows:
            plain = Example(
                source=self.name, place=place, agent=self.agent, reward=self.reward.name
            )
            right = right_answers(row.ground_truth)
            solutions = solutions_of(row)
            is_solution = runs_programs(self.reward.name) or not right
            right = solutions if is_solution else right
            why = self.reader if isinstance(self.reader, str) else ""
            if self.reward.name == LOOPS_OWN:
                why = "its agent loop or environment computes the reward"
            elif self.reward.name == "judge" and not asks_judges:
                why = "a model judges; `verl-mixed check --reward-examples` asks it"
            elif not right and runs_programs(self.reward.name):
                why = "its rows have hidden tests and no solution"
            elif not right:
                why = why or "its ground truths have no answer that is right for certain"
            if why:
                return [replace(plain, skipped=why)]
            tries = _Tries(group=self, row=row, backend=backend, is_solution=is_solution)
            others = [
                each
                for _, other in self.rows
                if other is not row
                for each in right_answers(other.ground_truth)
            ]
            try:
                found.append(await tries.example(plain, right, others))
            except Fault as error:
                return [*found, replace(plain, skipped=str(error))]
        bad = [each for each in found if each.problem]
        if len(bad) * 2 <= len(found):  # most rows are good
            words = f"{len(bad)} of {len(found)} rows that were tried: "
            found = [
                replace(each, problem=words + each.problem, is_doubt=True) if each in bad else each
                for each in found
            ]
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tries:
    """Writes answers to one row, and lets them be judged."""

    group: _Group
    row: Row
    backend: ToolBackend
    is_solution: bool
    """Whether the right answers are programs of the row."""

    def message(self, answer: str, form: Form) -> str:
        group, reader = self.group, self.group.reader
        assert isinstance(reader, Reader)
        as_program = group.as_program and not self.is_solution
        is_react = reader.own_forms == (FINAL,) and FINAL in group.forms and form is not FINAL
        return written(
            form,
            f"print({answer!r})" if as_program else answer,
            reader.tags,
            is_program=as_program or self.is_solution,
            before="Final Answer: " if is_react else "",
        )

    async def verdict(self, answer: str, form: Form) -> _Verdict:
        """What an answer earns.

        Raises:
            Fault: it cannot be judged here.
        """
        group, reward = self.group, self.group.reward
        assert isinstance(group.reader, Reader)
        rollout = await group.reader.read(self.message(answer, form))
        rollout.calls += [Call(turn=1, action="tool", status="ok")] * group.calls
        if rollout.fault is not None:
            raise ToolUnavailable(f"its agent failed: {rollout.fault}", tool=group.agent)
        attempt = attempt_of(rollout, self.row, max_response_length=1 << 30)
        try:
            async with timeout(group.verdict_s):
                parts = await reward.judge(attempt, self.backend)
        except Fault:
            raise
        except TimeoutError as error:
            words = f"no verdict within mixed.deadlines.reward_s={group.verdict_s:g} s"
            raise ToolUnavailable(words, tool=reward.name) from error
        except Exception as error:  # a function of the user's may raise anything
            if isinstance(error.__cause__, OSError) or not group.is_theirs:
                raise ToolUnavailable(f"{error}", tool=reward.name) from error
            return _Verdict(answer=rollout.answer, raised=error)
        is_full = parts["acc"] >= 1 and parts.get("task", parts["score"]) >= min(1.0, parts["acc"])
        return _Verdict(score=parts["score"], is_full=is_full, answer=rollout.answer)

    async def least(self, right: str, others: Sequence[str], form: Form) -> float:
        """The least that a wrong answer earns."""
        return min([(await self.verdict(w, form)).score for w in wrong_answers(right, others)])

    async def example(
        self, plain: Example, rights: Sequence[str], others: Sequence[str]
    ) -> Example:
        """The example of this row.

        Args:
            rights: its right answers, of which one that earns everything will do.
            others: right answers of other rows.
        """
        group, key = self.group, f"mixed.sources.{self.group.name}"
        best, right, form = _Verdict(), rights[0], group.forms[0]
        for each, how in [(each, how) for how in group.forms for each in rights]:
            verdict = await self.verdict(each, how)
            if best.answer is None or verdict.score > best.score or verdict.is_full:
                best, right, form = verdict, each, how
            if best.is_full:
                break
        least = await self.least(right, others, form)
        example = replace(
            plain,
            target=right,
            written=self.message(right, form),
            answer=best.answer,
            score=best.score,
            wrong=least,
        )
        if best.is_full and best.score <= least:
            words = f"{example.place}: a wrong answer earns {least:g}, as the right one"
            return replace(example, problem=f"{words}; correct {key}.reward or the rows")
        if best.is_full or (group.is_theirs and best.score > least):
            return example
        remedy = await self._remedy(right, others, form)
        if best.raised and not remedy:
            words = (
                f"{example.place}: the right answer gets no verdict for {example.written!r:.120}"
            )
            remedy = f"correct the function of {key}.reward"
            # A ValueError may be of a form that this check does not know.
            is_doubt = isinstance(best.raised.__cause__, ValueError)
            problem = f"{words}: {best.raised}; {remedy}"
            return replace(example, problem=problem, is_doubt=is_doubt)
        asked = f"the answer {form.words}"
        if group.as_program and not self.is_solution:
            asked = f"a program {form.words}"
        words = (
            f"{example.place}: the right answer earns {max(best.score, 0):g}: the prompt asks for "
            f"{asked}, so the model writes {example.written!r:.120}, agent={group.agent!r} finds "
            f"{best.answer!r:.120} there, and reward={group.reward.name!r} compares it with "
            f"{right!r:.80}"
        )
        # A solution of public data may be wrong, and a reward may want what no check can guess.
        is_doubt = (self.is_solution and best.answer is not None) or (
            group.is_theirs and not remedy
        )
        remedy = remedy or f"see what {key}.reward wants, and ask for it in {key}.system_prompt"
        return replace(example, problem=f"{words}; {remedy}", is_doubt=is_doubt)

    async def _remedy(self, right: str, others: Sequence[str], form: Form) -> str:
        """Tools or a prompt by which the right answer earns everything; empty if there are none."""
        group, key = self.group, f"mixed.sources.{self.group.name}"

        async def earns(form: Form, **changed: Any) -> bool:
            tries = replace(self, group=replace(group, as_program=False, **changed))
            verdict = await tries.verdict(right, form)
            if verdict.is_full or not tries.group.is_theirs:
                return verdict.is_full
            return verdict.score > await tries.least(right, others, form)

        if not group.calls and await earns(form, calls=1):
            return (
                "the reward wants a tool call, and the agent can make none: name tools in "
                f"{key}.tools, and allow 2 turns or more (max_turns)"
            )
        for each in dict.fromkeys([*group.forms, *EVERY]):
            if each is SENTENCE or not await earns(each):
                continue
            if group.as_program and each in group.forms:
                return (
                    f"ask for the answer itself: set prompts=instructed and leave {key}.prompt "
                    f"out, or name a template, as {key}.prompt={group.agent}_maths"
                )
            instructed = (
                f"; prompts=instructed without a {key}.prompt does it" if group.has_template else ""
            )
            learnt = f"('{key}.prompt={{}}' if the model has learnt its form from examples)"
            asks = f"ask for the answer {each.words}, as {key}.system_prompt={each.asks!r}"
            return f"{asks}{instructed} {learnt}"
        return ""


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
