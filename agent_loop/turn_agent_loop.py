"""Base classes of agent loops: connect `turn_loop` with verl's engine, chat template and rewards.

verl adapter: `AgentLoopBase` (experimental/agent_loop/agent_loop.py at 0.9.1). A user's own loop is
a subclass of `TaggedAgentLoop` that has a list of actions and a method which runs one. verl makes
an instance for each trajectory. What takes long to make is shared by all trajectories of the
process (`agent_loop.turns.loop_settings`).
"""

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

from agent_loop.compat import timeout
from agent_loop.prompts import with_system_text
from agent_loop.toolbox.own import Interpreter
from agent_loop.tools.client import ToolClient, shared_client
from agent_loop.tools.protocol import ToolBackend, ToolTimeout
from agent_loop.turns.engine_client import current_version, weight_versions
from agent_loop.turns.judging import COMMON_PARTS, judge
from agent_loop.turns.loop_settings import STRING_STOPS, LoopSettings, settings_of
from agent_loop.turns.observation_style import (
    ChatStyle,
    HFCodec,
    InlineStyle,
    ObservationStyle,
    codec_of,
)
from agent_loop.turns.record import facts_of, pack, texts_of
from agent_loop.turns.tags import Action, Language, Tags, fill_tags
from agent_loop.turns.trajectory import TRUNCATED
from agent_loop.turns.turn_loop import Generated, Observation, Rollout, Stop, run_turns


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

    def __init__(
        self,
        *args: Any,
        system_prompt: str | None = None,
        persistent_interpreter: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.system_prompt = system_prompt
        self.interpreter = Interpreter(persistent=persistent_interpreter)
        self.settings = settings_of(self.config)

    @abstractmethod
    def language(self) -> Language:
        """The form in which the model writes actions and answers."""

    @abstractmethod
    async def act(self, action: Action, extras: dict[str, Any]) -> Observation:
        """Run one action that is not the answer; `extras` are those of the row's `extra_info`.

        Raises:
            ToolUnavailable: the infrastructure failed. The trajectory then ends as `infra_error`.
        """

    async def run_code(self, code: str, stdin: str) -> Observation:
        """Run Python: a program, or the next cell of this trajectory's interpreter."""
        return await self.interpreter.run(self.client, code, stdin)

    async def begin(self, row: Mapping[str, Any]) -> None:
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

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        settings, source = self.settings, row["data_source"]
        client = await shared_client(settings.tools, settings.mixed)
        self.client = client.for_source(source)
        try:
            await self._begin_in_time(row)
            rollout = await self._rollout(sampling_params, row)
        finally:
            await self.end()
        version = current_version(self.server_manager, row)
        return await judged_output(rollout, row, self.client, settings, version)

    async def _begin_in_time(self, row: Mapping[str, Any]) -> None:
        budget = self.settings.budget_of(row["data_source"], row.get("step_deadline"))
        deadline = timeout(budget.timeout_s)
        try:
            async with deadline:
                await self.begin(row)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise ToolTimeout(
                f"the tools of source={row['data_source']} did not start within mixed.deadlines."
                f"{budget.timeout_name}, {budget.timeout_s:g} s; look for what they wait, for "
                "example start(row) of a class, or raise the deadline"
            ) from error

    async def _rollout(self, sampling_params: dict[str, Any], row: Mapping[str, Any]) -> Rollout:
        settings, source = self.settings, row["data_source"]
        extras = json.loads(row["extra_info"].get("extras") or "{}")
        messages = self._messages(row["raw_prompt"])
        engine = _Engine(self, settings.sampling_of(source, sampling_params))

        async def environment(action: Action) -> Observation:
            return await self.act(action, extras)

        codec = codec_of(self.tokenizer)
        prompt_ids = self._prompt_ids(messages)
        language, style = self.dialogue(codec, source, messages, prompt_ids)
        return await run_turns(
            prompt_ids=prompt_ids,
            generate=engine.generate,
            environment=environment,
            language=language,
            style=style,
            codec=codec,
            budget=settings.budget_of(source, row.get("step_deadline")),
            filler_id=self.tokenizer.eos_token_id,
        )

    def dialogue(
        self,
        codec: HFCodec,
        source: str,
        messages: list[dict[str, Any]],
        prompt_ids: Sequence[int],
    ) -> tuple[Language, ObservationStyle]:
        """How actions are read from the model's text, and how results enter the response.

        Args:
            messages: of the prompt.
            prompt_ids: (P,) the tokens of `messages`.
        """
        return self.language(), self._style(codec, source, messages)

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

    def _style(
        self, codec: HFCodec, source: str, messages: list[dict[str, Any]]
    ) -> ObservationStyle:
        longest = self.settings.mixed.turns.max_observation_length
        if self.settings.observation_style_of(source) == "inline":
            return InlineStyle(codec, *self.markers(), max_length=longest)
        # `all_special_tokens` has only the tokens that have a name, as eos.
        added = self.tokenizer.added_tokens_decoder.values()
        special = [token.content for token in added if token.special and len(token.content) > 1]

        def messages_of(turn_text: str, results: Sequence[str]) -> list[dict[str, Any]]:
            for token in special:  # a tool may print the text of a control token
                results = [text.replace(token, f"{token[0]} {token[1:]}") for text in results]
            return [
                {"role": "assistant", "content": turn_text},
                *({"role": "tool", "content": text} for text in results),
            ]

        def render(
            turn_text: str, results: Sequence[str], ids: Sequence[int]
        ) -> tuple[list[int], int]:
            before: list[Any] = list(ids)
            if before[-1] not in codec.end_ids:  # the turn was cut at a tag, without an end
                before.append(codec.message_end_id)
            new = messages_of(turn_text, results)
            merged = self.continuous_token_builder.merge_context_tokens(
                [*messages, new[0]], [*messages, *new], before
            )
            kept = min(len(ids), len(before) - merged.removed_prefix_token_count)
            return merged.token_ids[kept:], len(ids) - kept

        def keep(turn_text: str, results: Sequence[str]) -> None:
            messages.extend(messages_of(turn_text, results))

        return ChatStyle(codec, render, keep, longest)


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
        self._server, self._request_id = loop.server_manager, uuid4().hex
        self._sampling, self._settings = sampling, loop.settings

    async def generate(self, prompt_ids: list[int], *, max_tokens: int, stop: Stop) -> Generated:
        output = await self._server.generate(
            request_id=self._request_id,
            prompt_ids=prompt_ids,
            sampling_params={
                **self._sampling,
                "max_tokens": max_tokens,
                **self._stop_params(stop),
            },
        )
        oldest, newest = weight_versions(output)
        return Generated(
            token_ids=output.token_ids,
            log_probs=output.log_probs or [],
            min_global_steps=oldest,
            max_global_steps=newest,
        )

    def _stop_params(self, stop: Stop) -> dict[str, Any]:
        how = self._settings.mixed.turns.stop_at_tag
        params: dict[str, Any] = {}
        if how in ("auto", "token_ids"):
            params["stop_token_ids"] = list(stop.token_ids)
        if how == "strings" or (how == "auto" and self._settings.backend in STRING_STOPS):
            params |= {"stop": list(stop.texts), "include_stop_str_in_output": True}
        return params


class JudgedOutput(AgentLoopOutput):
    """verl's output, with the reward on the last token that the policy sampled, and with a column
    of texts.

    verl puts the reward on the last token of the response. If that is a tool's token, the
    estimators that sum rewards over the policy's tokens (gae, remax, reinforce_plus_plus) would
    lose the reward.
    """

    mixed_texts: bytes
    """`record.pack` of the texts: a column of the batch."""

    def as_dict(self) -> dict[str, Any]:
        fields = super().as_dict()
        written = fields["response_mask"].nonzero()
        fields["extra_fields"]["mixed"]["trained_tokens"] = len(written)
        if len(written) and (scores := fields.get("rm_scores")) is not None:
            scores[-1], scores[int(written[-1])] = 0.0, self.reward_score
        return fields


async def judged_output(
    rollout: Rollout,
    row: Mapping[str, Any],
    tools: ToolBackend,
    settings: LoopSettings,
    version: int,
) -> JudgedOutput:
    """Compute the reward of a trajectory, log an error of its loop, and return verl's output.

    Args:
        version: current version of the weights, for a trajectory without a turn.
    """
    source = row["data_source"]
    parts = await judge(rollout, row, settings, tools)
    on_truncated = settings.on_truncated_of(source)
    if on_truncated == "mask" and rollout.stop_reason in TRUNCATED:
        rollout.trajectory.without_gradient()
    oldest, newest = rollout.weight_versions or (version, version)
    if rollout.loop_error is not None:
        row_id = row["extra_info"]["row_id"]
        settings.log_loop_error(source, row_id, rollout.fault or "", rollout.loop_error)
    trajectory = rollout.trajectory
    return JudgedOutput(
        prompt_ids=trajectory.prompt_ids,
        response_ids=trajectory.response_ids,
        response_mask=trajectory.loss_mask(settings.tools.state_masking),
        response_logprobs=trajectory.log_probs,
        reward_score=parts["score"],
        # verl counts user, assistant and tool messages
        num_turns=1 + len(rollout.turns) + len(rollout.calls),
        metrics=AgentLoopMetrics(
            generate_sequences=sum(turn.generate_s for turn in rollout.turns),
            tool_calls=sum(turn.tools_s for turn in rollout.turns),
        ),
        mixed_texts=pack(texts_of(rollout)),
        extra_fields={
            "reward_extra_info": {name: parts[name] for name in COMMON_PARTS},
            "mixed": facts_of(rollout)
            | {
                "reward_parts": parts,
                "state_masking": settings.tools.state_masking,
                "on_truncated": on_truncated,
            },
            "min_global_steps": oldest,
            "max_global_steps": newest,
        },
    )
