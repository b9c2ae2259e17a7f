"""Agent loop of programs that were not written for this project: the gateway.

Each session has an address that speaks OpenAI's and Anthropic's protocols (`agent_loop.gateway`).
An agent, a command or a function, is given the address and the row, and asks the policy what it
likes. Its requests become the sequences of the session. The session ends when the agent ends, or at
its deadline. An agent that goes on after its turns are used up is stopped a little later.
"""

import asyncio
import logging
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import msgspec

from agent_loop.gateway.program import AgentProgram
from agent_loop.gateway.server import Address, Gateway
from agent_loop.gateway.session import Policy, Session
from agent_loop.gateway.template import ChatTemplate
from agent_loop.named_tools_loop import NamedToolsLoop
from agent_loop.native_agent_loop import format_of
from agent_loop.records.trajectory_record import StopReason
from agent_loop.row import Row
from agent_loop.turns.codec import codec_of
from agent_loop.turns.tags import Language
from agent_loop.turns.trajectory import Trajectory
from agent_loop.turns.turn_loop import Generated, Rollout, Stop
from agent_loop.watchdog import current_activity, waits_for
from config.gateway import GatewayOptions
from config.schema import LOOPS_OWN
from samplers.module_file import named_in

logger = logging.getLogger(__name__)

END_S = 10.0
"""Longest wait for an agent that was cancelled. A program on the host is killed after a second."""


class GatewayAgentLoop(NamedToolsLoop):
    """Runs an agent for each session and trains the policy on what it asks.

    Args:
        tool_names: tools of the tool server at the MCP address of a source that names no `tools`.
        options: see `config.gateway.GatewayOptions`.
    """

    several_rows = True

    def __init__(
        self, *args: Any, tool_names: Sequence[str] | None = (), topk: int = 3, **settings: Any
    ) -> None:
        names = GatewayOptions.model_fields
        options = {name: settings.pop(name) for name in names if name in settings}
        super().__init__(*args, tool_names=tool_names, topk=topk, **settings)
        self._key = msgspec.json.encode(options)
        self._options = GatewayOptions.model_validate(options)

    def language(self) -> Language:
        raise NotImplementedError("the agent reads the model's messages")

    async def begin(self, row: Row) -> None:
        await super().begin(row)
        self._row = row.visible()

    async def conversations(self, messages: list[dict[str, Any]]) -> list[Rollout]:
        gateway: Gateway = self.client.resource("gateway", Gateway)
        session = Session(
            policy=self._policy(),
            engine=self._generate,
            budget=self._budget,
            specs=self.specs,
            act=partial(self.act, extras=self._extras),
            temperature=float(self._engine.sampling["temperature"]),
            max_requests=self._options.max_requests,
            takes_reward=self.settings.reward_name_of(self._source) == LOOPS_OWN,
        )
        address = await gateway.open(session)
        with current_activity(asyncio.get_running_loop().time) as activity:
            waits_for("agent")
            agent = asyncio.ensure_future(
                self._agent(gateway, address, {**self._row, "prompt": messages})
            )
            over = asyncio.ensure_future(session.over.wait())
            try:
                await asyncio.wait(
                    {agent, over},
                    timeout=self._deadline.left_s(),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                has_ended = agent.done()
                has_answered = session.is_told_to_end and session.has_verdict
                is_late = not (has_ended or over.done() or has_answered)
            finally:
                agent.cancel()
                over.cancel()
                try:
                    await gateway.shut(session)
                finally:
                    await asyncio.wait({agent, over}, timeout=END_S)
            for name in sorted(session.ignored):
                _warn_of_ignored(self._source, name)
            rollouts = session.rollouts() or [self._empty()]
            last = rollouts[-1]
            if not agent.done():
                raise RuntimeError(
                    f"the agent goes on {END_S:g} s after it was cancelled; let CancelledError pass"
                )
            if session.fault is not None:
                last.lose(session.fault.tool or "engine", str(session.fault))
            elif session.crash is not None:
                raise session.crash
            elif is_late:
                last.lose_to_deadline(self._deadline, activity)
            elif session.is_cut:  # what the agent made of a cut message is no answer
                last.stop_reason = StopReason.RESPONSE_BUDGET
            else:
                self._take_answer(rollouts, session, agent if has_ended else None)
        for rollout in rollouts:
            rollout.trajectory.finish(self.tokenizer.eos_token_id)
        if last.is_lost:
            last.trajectory.without_gradient()
        return rollouts

    def _take_answer(
        self,
        rollouts: list[Rollout],
        session: Session,
        agent: "asyncio.Future[str | float | None] | None",
    ) -> None:
        """The answer and the reward of an agent that ended by itself, or (None) was stopped.

        Raises what the agent raised, unless a budget was used up: clients raise when refused. And
        raises RuntimeError if the policy said nothing, so that there is nothing to judge.
        """
        last, said = rollouts[-1], None
        if agent is not None:
            has_failed = agent.cancelled() or agent.exception() is not None
            said = None if has_failed and session.exhausted else agent.result()
        if not any(turn.tokens for each in rollouts for turn in each.turns):
            why = "it asked for none"
            if session.refusal is not None:
                why = f"its last refused request: {session.refusal}"
            raise RuntimeError(
                f"the agent ended without a message of the policy ({why}); let it ask at its "
                "address, and wait for the reply"
            )
        if isinstance(said, str) and session.answer is None:
            session.answer = said
        elif said is not None and not isinstance(said, str):
            session.set_verdict({"reward": said})
        if session.reward is not None:
            last.verdict = {"score": session.reward}
        last.answer, last.answer_is_message = session.answer, True
        without = session.exhausted or StopReason.NO_ACTION
        last.stop_reason = StopReason.ANSWERED if session.has_verdict else without

    async def _agent(
        self, gateway: Gateway, address: Address, row: dict[str, Any]
    ) -> str | float | None:
        """Run the agent to its end: its answer, or its own reward."""
        options = self._options
        if options.function is not None:
            return await named_in(options.function, "function")(address, row)
        program: AgentProgram = self.client.resource(
            ("agent", self._key), partial(AgentProgram, options)
        )
        end = await program.run(
            address.variables, msgspec.json.encode(row), port=gateway.port, serve=gateway.serving
        )
        if end.exit_code != 0:
            words = f"; its stderr ends with: {end.stderr[-600:]}" if end.stderr.strip() else ""
            raise RuntimeError(f"the agent ended with exit code {end.exit_code}{words}")
        return end.answer

    async def _generate(
        self,
        prompt_ids: list[int],
        *,
        max_tokens: int,
        stop: Stop,
        temperature: float,
        sequence: str,
        schema: dict[str, Any] | None,
    ) -> Generated:
        changed: dict[str, Any] = {"temperature": temperature}
        if schema is not None:
            changed["structured_outputs"] = self._guide(schema)
        return await self._engine.generate(
            prompt_ids, max_tokens=max_tokens, stop=stop, request_id=sequence, **changed
        )

    def _guide(self, schema: dict[str, Any]) -> Any:
        """vLLM's parameter of guided decoding: JSON for a server at a URL, an object for verl's,
        which hands it to vLLM's `SamplingParams` as it is (vLLM 0.24.0)."""
        if self.settings.backend == "openai":
            return {"json": schema}
        from vllm.sampling_params import StructuredOutputsParams  # pyright: ignore

        return StructuredOutputsParams(json=schema)

    def _policy(self) -> Policy:
        """What the sessions of a source share."""
        return self.client.resource(("policy", self._source, self._key), self._make_policy)

    def _make_policy(self) -> Policy:
        codec, builder = codec_of(self.tokenizer), self.continuous_token_builder
        name, rollout = self.settings.call_format, self.rollout_config
        return Policy(
            template=ChatTemplate(
                lambda messages, tools: builder.build_initial_tokens(messages, tools=tools),
                self.rendering,
                codec,
                codec.mark_texts,
                rollout.prompt_length + rollout.response_length,
            ),
            codec=codec,
            call_format=None if name is None else format_of(name),
            prompt_length=rollout.prompt_length,
            agent_may_set=frozenset(self._options.let_agent_set),
            is_guided=self._options.structured == "guided",
        )

    def _empty(self) -> Rollout:
        """The sequence of a session without a request to the model."""
        return Rollout(
            trajectory=Trajectory([self.tokenizer.eos_token_id]),
            stop_reason=StopReason.NO_ACTION,
            answer=None,
        )


@lru_cache(1000)
def _warn_of_ignored(source: str, name: str) -> None:
    """Log a field that an agent sent and that has no effect, once."""
    logger.warning("source=%s a field that its agent sent has no effect: %s", source, name)
