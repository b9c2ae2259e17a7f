"""Base classes of agent loops: connect `turn_loop` with verl's engine, chat template and rewards.

verl adapter: `AgentLoopBase` (experimental/agent_loop/agent_loop.py at 0.9.1). A user's own loop is
a subclass of `TaggedAgentLoop` that has a list of actions and a method which runs one. A loop that
holds several conversations in one session (a compacted context, a sub-agent) overrides
`conversations`. verl makes an instance for each session. What takes long to make is shared by all
sessions of the process (`agent_loop.loop_settings`).
"""

import logging
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar
from uuid import uuid4

from pydantic import PrivateAttr
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

from agent_loop.calls.client import ToolClient, shared_client
from agent_loop.loop_settings import STRING_STOPS, LoopSettings, settings_of
from agent_loop.prompts import with_system_text
from agent_loop.records.trajectory_record import (
    COMMON_PARTS,
    TRUNCATED,
    TrajectoryRecord,
    to_columns,
)
from agent_loop.rewards.judging import judge
from agent_loop.rewards.number import WANTED, reward_number, shown
from agent_loop.row import Row
from agent_loop.toolbox.own import CodeRunner
from agent_loop.training.verl_adapters.engine_client import (
    current_version,
    request_of,
    turns_of_trajectory,
    weight_versions,
)
from agent_loop.turns.codec import HFCodec, codec_of
from agent_loop.turns.native import messages_of
from agent_loop.turns.observation_style import GlueOf, inline_glue
from agent_loop.turns.tags import Action, Language, Tags, fill_tags
from agent_loop.turns.tool_messages import Render, ToolMessages
from agent_loop.turns.turn_loop import Generated, Observation, Rollout, Stop, run_turns
from config.compat import timeout
from tool_server.wire.protocol import Fault, ToolBackend, ToolTimeout

logger = logging.getLogger(__name__)


class TurnAgentLoop(AgentLoopBase):
    """An agent that works in turns.

    Args:
        system_prompt: a text at the end of the system message (see `agent_loop.prompts`), in which
            names as `{code_start_tag}` are replaced by the tags of `tool_config`. None: no text.
        persistent_interpreter: whether all code of a trajectory runs in one interpreter, which
            keeps its state between calls. Otherwise every call runs a separate program.
    """

    tokenizer: Any

    client: ToolClient
    """Client of the tool server, shared in the process: limiter, slots, retries, cache."""

    settings: LoopSettings

    several_rows: ClassVar[bool] = False
    """Whether a session may be several sequences. `verl-mixed check` then refuses settings in which
    the gradient would depend on how a session is cut; see docs/masks.md."""

    acts_at_end: ClassVar[bool] = False
    """Whether the actions of the last turn are run too; see `run_turns`."""

    def __init__(
        self,
        *args: Any,
        system_prompt: str | None = None,
        persistent_interpreter: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.system_prompt = system_prompt
        self.interpreter = CodeRunner(persistent=persistent_interpreter)
        self.settings = settings_of(self.config)

    @abstractmethod
    def language(self) -> Language:
        """The form in which the model writes actions and answers."""

    @abstractmethod
    async def act(self, action: Action, extras: dict[str, Any]) -> Observation:
        """Run one action that is not the answer; `extras` are the row's own fields.

        Raises:
            ToolUnavailable: the infrastructure failed. The trajectory then ends as `infra_error`.
        """

    async def run_code(self, code: str, stdin: str) -> Observation:
        """Run Python: a program, or the next cell of this trajectory's interpreter."""
        return await self.interpreter.run(self.client, code, stdin)

    async def begin(self, row: Row) -> None:
        """Make what this trajectory needs, before its prompt is made, within the deadline of a
        trajectory.

        Raises:
            ToolUnavailable: the infrastructure failed. The trajectory then ends as `infra_error`.
        """

    async def end(self) -> None:
        """Free what `begin` and the trajectory made; it is always called."""
        await self.interpreter.close(self.client)

    def system_text(self) -> str:
        """What the loop adds to the system message; empty for nothing."""
        return fill_tags(self.system_prompt or "", self.settings.tools)

    def tool_schemas(self) -> list[dict[str, Any]]:
        """Schemas of tools that the chat template puts into the prompt."""
        return []

    def markers(self) -> tuple[str, str]:
        """Texts before and after a result in the `inline` style."""
        tools = self.settings.tools
        return tools.start_state_marker, tools.end_state_marker

    async def conversations(self, messages: list[dict[str, Any]]) -> list[Rollout]:
        """The conversations of a session, each of which is a sequence; the last one answers.

        By default there is one. A loop with several overrides this method, calls `converse` for
        each, and sets `several_rows`.

        Args:
            messages: of the prompt.
        """
        return [await self.converse(messages)]

    # verl's worker takes a list too (`_agent_loop_postprocess`), its base class does not say so.
    async def run(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, sampling_params: dict[str, Any], **columns: Any
    ) -> AgentLoopOutput | list[AgentLoopOutput]:
        """One output, or a list of them, one for each sequence of the session."""
        settings, row = self.settings, Row.from_columns(columns)
        self._deadline = settings.deadline_of(row.step_deadline)
        client = await shared_client(settings.tools, settings.mixed)
        self.client = client.for_source(row.source, self._deadline)
        try:
            await self._begin_in_time(row)
            self._begin_session(sampling_params, row)
            rollouts = await self.conversations(self._messages(row.messages))
        finally:
            await self.end()
        version = current_version(self.server_manager, row.global_steps)
        check_sequences(type(self), len(rollouts), row.source)
        tools = client.for_source(row.source, settings.reward_deadline())
        judged = await judged_outputs(rollouts, row, tools, settings, version)
        outputs: list[AgentLoopOutput] = [output for _, output in judged]
        return outputs if len(outputs) > 1 else outputs[0]

    async def _begin_in_time(self, row: Row) -> None:
        deadline = self._deadline
        whole = timeout(deadline.left_s())
        try:
            async with whole:
                await self.begin(row)
        except (TimeoutError, Fault) as error:
            if not whole.expired() and deadline.left_s():
                raise
            raise ToolTimeout(
                f"the tools of source={row.source} did not start within mixed.deadlines."
                f"{deadline.name}, {deadline.limit_s:g} s; look for what they wait, for "
                "example start(row) of a class, or raise the deadline"
            ) from error

    def _begin_session(self, sampling_params: dict[str, Any], row: Row) -> None:
        self._source, self._extras = row.source, row.extras
        self._engine = _Engine(self, self.settings.sampling_of(self._source, sampling_params))
        self._budget = self.settings.budget_of(self._source)
        self._turns_left = self._budget.max_turns

    async def converse(
        self,
        messages: list[dict[str, Any]],
        *,
        cause: str = "",
        act: Callable[[Action], Awaitable[Observation]] | None = None,
        max_turns: int | None = None,
        response_length: int | None = None,
    ) -> Rollout:
        """Hold one conversation with the model, to its end.

        The turns of all conversations of a session count together, and all have one deadline.

        Args:
            messages: of the prompt; the list is the conversation's own.
            cause: why this conversation began; see `Rollout.cause`.
            act: runs an action in place of the method `act`.
            max_turns: generations of this conversation, if fewer than those that are left.
            response_length: tokens of its response, if fewer than the source's.
        """
        own, extras = self._budget, self._extras
        budget = replace(
            own,
            max_turns=min(own.max_turns, max_turns or own.max_turns),
            take_turn=self._take_turn,
            response_length=min(own.response_length, response_length or own.response_length),
        )

        conversation = uuid4().hex

        async def environment(action: Action) -> Observation:
            return await (self.act(action, extras) if act is None else act(action))

        codec = codec_of(self.tokenizer)
        prompt_ids = self._prompt_ids(messages)
        language, glue = self.dialogue(codec, self._source, prompt_ids)
        rollout = await run_turns(
            prompt_ids=prompt_ids,
            generate=partial(self._engine.generate, request_id=conversation),
            environment=environment,
            language=language,
            glue=glue,
            codec=codec,
            budget=budget,
            deadline=self._deadline,
            filler_id=self.tokenizer.eos_token_id,
            acts_at_end=self.acts_at_end,
        )
        rollout.cause = cause
        return rollout

    def _take_turn(self) -> bool:
        self._turns_left -= 1
        return self._turns_left >= 0

    def dialogue(
        self, codec: HFCodec, source: str, prompt_ids: Sequence[int]
    ) -> tuple[Language, GlueOf]:
        """How actions are read from the model's text, and how results enter the response."""
        return self.language(), self._glue(codec, source)

    def _messages(self, rows_own: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        messages = [dict(message) for message in rows_own]
        if not all(isinstance(message["content"], str) for message in messages):
            raise ValueError(
                "the prompt has images, videos or audio: this agent gives the model text only; "
                "set mixed.sources.<name>.agent to one that passes them, as tool_agent"
            )
        return with_system_text(messages, after=self.system_text())

    def _prompt_ids(self, messages: list[dict[str, Any]]) -> list[int]:
        """The tokens of the prompt. verl would cut a long prompt at its beginning."""
        # verl does this in a thread, which takes more time than it saves.
        prompt_ids = self.continuous_token_builder.build_initial_tokens(
            messages, tools=self.tool_schemas() or None
        )
        longest = self.rollout_config.prompt_length
        if len(prompt_ids) > longest:
            raise ValueError(
                f"the prompt has {len(prompt_ids)} tokens with its system prompt, more than "
                f"data.max_prompt_length={longest}: a prompt is never cut; raise the limit, or "
                "shorten system_prompt in rollout.agent.agent_loop_config_path"
            )
        return prompt_ids

    def _glue(self, codec: HFCodec, source: str) -> GlueOf:
        if self.settings.observation_style_of(source) == "inline":
            return inline_glue(codec, *self.markers())
        messages = self.tool_messages(codec)
        return lambda count: messages.glue((), ("tool",) * count)

    def tool_messages(self, codec: HFCodec) -> ToolMessages:
        """The template's glue around results, shared by the trajectories with the same tools."""
        tools = self.tool_schemas()
        names = sorted(tool["function"]["name"] for tool in tools)
        return self.client.resource(
            f"glue {names}", partial(messages_of, self.rendering(tools), codec)
        )

    def rendering(self, tools: list[dict[str, Any]]) -> Render:
        """The chat template with these tools, as text."""
        template = partial(
            self.tokenizer.apply_chat_template,
            tools=tools or None,
            tokenize=False,
            **self.continuous_token_builder.chat_template_kwargs,
        )
        return lambda messages, add_generation_prompt: template(
            messages, add_generation_prompt=add_generation_prompt
        )


class TaggedAgentLoop(TurnAgentLoop):
    """An agent that asks for tools and answers with tags."""

    actions: ClassVar[Sequence[str]]
    """Names of the actions; one of them is "answer"."""

    own_tags: ClassVar[Mapping[str, tuple[str, str]]] = {}
    """Action -> its start and end tag, for actions that `tool_config` does not have."""

    answer_boxed: bool = False
    r"""Whether a turn without tags may answer with `\boxed{...}`."""

    def language(self) -> Language:
        return Tags.from_config(
            self.settings.tools,
            self.actions,
            self.own_tags,
            max_actions=self.settings.max_actions,
            answer_boxed=self.answer_boxed,
        )


class _Engine:
    """verl's rollout server as a `Generate` function, for one trajectory."""

    def __init__(self, loop: TurnAgentLoop, sampling: dict[str, Any]) -> None:
        self._server, self._settings = loop.server_manager, loop.settings
        self.sampling = sampling

    async def generate(
        self,
        prompt_ids: list[int],
        *,
        max_tokens: int,
        stop: Stop,
        request_id: str,
        **changed: Any,
    ) -> Generated:
        """Generate; `changed` are sampling parameters of this request. Requests with one id follow
        each other; the server of the first gets them all."""
        params = {**self.sampling, **changed, "max_tokens": max_tokens}
        how = self._settings.mixed.turns.stop_at_tag
        if how in ("auto", "token_ids"):
            params["stop_token_ids"] = list(stop.token_ids)
        if how == "strings" or (how == "auto" and self._settings.backend in STRING_STOPS):
            params |= {"stop": list(stop.texts), "include_stop_str_in_output": True}
        output = await self._server.generate(
            request_id=request_id, prompt_ids=prompt_ids, sampling_params=params
        )
        oldest, newest = weight_versions(output)
        return Generated(
            token_ids=output.token_ids,
            log_probs=output.log_probs or [],
            min_global_steps=oldest,
            max_global_steps=newest,
            request=request_of(output),
        )


class JudgedOutput(AgentLoopOutput):
    """verl's output with the record of its trajectory, and with the reward on the last token that
    the policy sampled.

    verl puts the reward on the last token of the response. If that is a tool's token, the
    estimators that sum rewards over the policy's tokens (gae, remax, reinforce_plus_plus) would
    lose the reward.
    """

    _record: TrajectoryRecord = PrivateAttr()
    _is_written: bool = PrivateAttr(default=True)
    """Whether the record goes to the trainer, as it does not in a recipe of verl's own."""

    @property
    def record(self) -> TrajectoryRecord:
        return self._record

    def as_dict(self) -> dict[str, Any]:
        fields = super().as_dict()
        written = fields["response_mask"].nonzero()
        if len(written) and (scores := fields.get("rm_scores")) is not None:
            scores[-1], scores[int(written[-1])] = 0.0, self.reward_score
        if self._is_written:
            self._record.trained_tokens = len(written)
            fields["extra_fields"]["mixed"], fields["mixed_texts"] = to_columns(self._record)
        return fields


def check_sequences(kind: type, sequences: int, source: str) -> None:
    """Refuse several sequences of a loop that does not say that it may return them.

    Raises:
        TypeError: the class has no `several_rows = True`.
    """
    if sequences > 1 and not getattr(kind, "several_rows", False):
        raise TypeError(
            f"the loop of source={source} returned {sequences} outputs for one session, and "
            f"{kind.__name__} does not say that it may; set several_rows = True in the class, so "
            "that `verl-mixed check` refuses settings in which the rows of a session cannot be "
            "weighted"
        )


async def judged_outputs(
    rollouts: Sequence[Rollout],
    row: Row,
    tools: ToolBackend,
    settings: LoopSettings,
    version: int,
) -> list[tuple[Rollout, JudgedOutput]]:
    """Compute the reward of a session, log an error of its loop, and make verl's outputs.

    The last sequence answers, and all get its reward. A fault in one loses the whole session.
    Sequences without a token of the model are left out, except for the last one.

    In a recipe of verl's own (`LoopSettings.judges` is false) the outputs have a reward only if the
    loop computed one. verl's reward loop judges the others, and has `answer`, `stop_reason` and
    `fault` in `extra_info`.

    Args:
        rollouts: the sequences of the session, at least one.
        version: current version of the weights, for a sequence without a turn.

    Raises:
        RuntimeError: the loop's own code raised, in a recipe of verl's own. verl then fails the
            group, because nobody there stops a run whose sessions are all lost.
        ValueError: the loop's score is no reward (`reward_number`), in a recipe of verl's own.
    """
    source, last = row.source, rollouts[-1]
    if (lost := next((each for each in rollouts if each.is_lost), None)) is not None:
        _lose_as(last, lost)
    parts: dict[str, Any] = last.verdict or {}
    if settings.judges:
        parts = await judge(last, row, settings, tools, rollouts[:-1])
    elif parts:
        parts = {**parts, "score": reward_number(given := parts.get("score"))}
        if parts["score"] is None:
            raise ValueError(f"the loop of source={source} set score={shown(given)}: want {WANTED}")
    on_truncated = settings.on_truncated_of(source)
    is_masked = on_truncated == "mask" and last.stop_reason in TRUNCATED
    if last.loop_error is not None:
        settings.log_loop_error(source, row.row_id, last.fault or "", last.loop_error)
    if last.is_lost and not settings.judges:
        if last.loop_error is not None:
            raise RuntimeError(f"the agent loop of source={source} raised {last.fault}")
        logger.warning("session lost source=%s fault=%s", source, last.fault)
    kept = [each for each in rollouts if each is last or any(turn.tokens for turn in each.turns)]
    for each in kept:
        each.stop_reason = last.stop_reason  # a record says how its session ended
        if last.is_lost:
            _lose_as(each, last)
        elif is_masked:
            each.trajectory.without_gradient()
    requests = turns_of_trajectory.get()
    outputs: list[tuple[Rollout, JudgedOutput]] = []
    for each in kept:
        record = each.record()
        record.reward_parts, record.on_truncated = parts, on_truncated
        record.state_masking = settings.tools.state_masking
        record.rows, record.parent = len(kept), _place_of(each.parent, kept)
        record.requests = None if requests is None else len(requests)
        outputs.append((each, _output_of(each, record, settings, version)))
    return outputs


def _lose_as(rollout: Rollout, other: Rollout) -> None:
    """Lose a sequence to the fault of another one of its session."""
    if rollout is not other:
        rollout.lose(other.fault_tool, other.fault or "", other.stop_reason)
        rollout.loop_error = other.loop_error
        rollout.trajectory.without_gradient()


def _place_of(parent: Rollout | None, sequences: Sequence[Rollout]) -> int | None:
    return next((place for place, each in enumerate(sequences) if each is parent), None)


def _output_of(
    rollout: Rollout, record: TrajectoryRecord, settings: LoopSettings, version: int
) -> JudgedOutput:
    """verl's output of one sequence."""
    parts, trajectory = record.reward_parts, rollout.trajectory
    oldest, newest = rollout.weight_versions or (version, version)
    extra: dict[str, Any] = {"min_global_steps": oldest, "max_global_steps": newest}
    if parts:
        common = {name: parts[name] for name in COMMON_PARTS if name in parts}
        extra["reward_extra_info"] = common
    columns: dict[str, Any] = {}
    if not settings.judges:
        # those that verl's loops set: all rows of TransferQueue need the same
        columns = {"mm_processor_kwargs": {}, "mm_processor_output": None}
        extra |= {"answer": record.answer, "fault": record.fault}
        extra["stop_reason"] = record.stop_reason
    output = JudgedOutput(
        prompt_ids=trajectory.prompt_ids,
        response_ids=trajectory.response_ids,
        response_mask=trajectory.loss_mask(settings.tools.state_masking),
        response_logprobs=trajectory.log_probs,
        reward_score=parts.get("score"),
        # verl counts user, assistant and tool messages
        num_turns=1 + len(rollout.turns) + len(rollout.calls),
        metrics=AgentLoopMetrics(
            generate_sequences=sum(turn.generate_s for turn in rollout.turns),
            tool_calls=sum(turn.tools_s for turn in rollout.turns),
        ),
        extra_fields=extra,
        **columns,
    )
    output._record, output._is_written = record, settings.judges
    return output
