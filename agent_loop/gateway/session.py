"""One session of the gateway: the requests of one agent, as sequences to train the policy on.

A request becomes tokens (`chains`), the engine goes on from them, and its tokens become a reply.
A conversation has as many turns, and a sequence as many tokens, as the trajectory of any other
agent, and the session has a largest number of requests. No verl, no HTTP.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from agent_loop.gateway.chains import Chains, Continuation
from agent_loop.gateway.chat_form import assistant_message, call_of
from agent_loop.gateway.demands import can_call, misfit
from agent_loop.gateway.template import ChatTemplate
from agent_loop.gateway.wire import (
    Finish,
    ModelReply,
    ModelRequest,
    ReplyCall,
    TokenLogprob,
    WireError,
)
from agent_loop.records.trajectory_record import Call, StopReason, Turn
from agent_loop.rewards.number import WANTED, reward_number, shown
from agent_loop.toolbox.spec import ToolSpec
from agent_loop.turns.call_formats import CallFormat, CallMistake
from agent_loop.turns.call_formats.message import new_call_id
from agent_loop.turns.codec import TokenCodec
from agent_loop.turns.native import prompt_opens_thought
from agent_loop.turns.tags import Action, first_end, stop_token_ids
from agent_loop.turns.trajectory import Trajectory
from agent_loop.turns.turn_loop import Budget, Generated, Observation, Rollout, Stop, append_turn
from agent_loop.watchdog import waits_for
from config.gateway import MAX_REQUESTS
from tool_server.wire.protocol import Fault

MOST_IGNORED = 50
"""Names of ignored fields that are kept of one session."""

WIND_UP_S = 10.0
"""Time for an agent to end by itself that was told to (`Session.is_told_to_end`). Posting an answer
or ending a program takes less than a second, also on a busy host; an agent that only asks again
holds up its batch for this long."""


Engine = Callable[..., Awaitable[Generated]]
"""As `turn_loop.Generate`, with `temperature`, with `sequence`, the id of the conversation, because
requests of one session run side by side, and with `schema`, which guides the decoding; None: any
text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What all sessions of a source share."""

    template: ChatTemplate
    codec: TokenCodec
    call_format: CallFormat | None
    """Reads the tool calls; None: the model has no format, so requests with tools are refused."""

    prompt_length: int
    agent_may_set: frozenset[str] = frozenset()
    """Sampling parameters that a request may change: `temperature`."""

    is_guided: bool = False
    """Whether the engine is given the JSON schema of a reply that cannot have calls."""


class _Stops:
    """The stop texts of a request, as the `Language` of a turn that has no actions."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.stop_texts = list(texts)

    def find_end(self, text: str) -> int:
        return first_end(text, self.stop_texts)

    def actions(self, text: str, *, is_whole: bool = True) -> list[Any]:
        return []


@dataclass(eq=False, slots=True, kw_only=True)
class Session:
    """The requests of one agent.

    Args:
        engine: generates.
        budget: `max_turns` is of each conversation, `response_length` of each sequence.
        max_requests: that the engine may get, of all conversations together.
    """

    policy: Policy
    engine: Engine
    budget: Budget
    specs: Mapping[str, ToolSpec]
    """The tools at its MCP address, by their names."""

    act: Callable[[Action], Awaitable[Observation]]
    """Calls one of them."""

    temperature: float
    """Of requests that may not change it."""

    max_requests: int = MAX_REQUESTS
    id: str = field(default_factory=lambda: uuid4().hex + uuid4().hex)
    """Unguessable: 244 random bits."""

    reward_id: str = field(default_factory=lambda: uuid4().hex + uuid4().hex)
    """The same, of the address that takes the answer and the reward."""

    takes_reward: bool = False
    """Whether its agent program may post a reward; whatever runs beside it might post one too."""

    answer: str | None = None
    reward: float | None = None
    """What the agent said of its answer; see `server`."""

    exhausted: StopReason | None = None
    """The budget that the agent used up."""

    refusal: str | None = None
    """Why its last refused request was refused."""

    is_cut: bool = False
    """Whether a limit of the run cut the model's last message, and no request was refused since."""

    fault: Fault | None = None
    """The first fault of the infrastructure."""

    crash: Exception | None = None
    """What the code of the gateway or of a tool raised."""

    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to stop the agent: the session is lost, or it is `WIND_UP_S` since the agent was told to
    end."""

    is_closed: bool = False
    ignored: set[str] = field(default_factory=set[str])
    """Names of fields that the agent sent and that have no effect; at most `MOST_IGNORED`."""

    context: Context = field(default_factory=copy_context)
    """Context variables of the trajectory, for the tasks of its requests."""

    _chains: Chains = field(init=False)
    _early_calls: list[Call] = field(default_factory=list[Call])
    """Calls of tools before the first request."""

    _requests: int = 0
    """Requests that reached the engine: each is a turn of a conversation."""

    _generating: int = 0
    """Those of them that the engine has not answered."""

    _end: asyncio.TimerHandle | None = None
    """Stops the agent that was told to end."""

    _calls: int = 0

    def __post_init__(self) -> None:
        self._chains = Chains(self.policy.template)

    async def reply(self, request: ModelRequest) -> ModelReply:
        """The policy's next message.

        Raises:
            WireError: the request cannot be answered, the budget is used up, or the engine failed.
        """
        self._check(request)
        temperature = self._temperature(request)
        continuation = await self._chains.place(request, temperature)
        said = None
        try:
            reply, said = await self._say(request, continuation)
        except Fault as error:
            raise self.lose(error) from error
        finally:
            self._chains.say(continuation.sequence, said)
        return reply

    @property
    def is_told_to_end(self) -> bool:
        """Whether the limits of turns or requests refused a request, no conversation may go on, and
        all messages of the model are there. While one is generated, an agent that asked several
        things at once waits for it."""
        if self.exhausted != StopReason.MAX_TURNS or self._generating:
            return False
        turns_left = any(each.turns < self.budget.max_turns for each in self._chains.sequences)
        return self._requests >= self.max_requests or not turns_left

    def rollouts(self) -> list[Rollout]:
        """The sequences, the one with the last request last; none without a request."""
        sequences = sorted(self._chains.sequences, key=lambda each: each.last_request)
        return [each.rollout for each in sequences if each.rollout.turns]

    def note(self, call: Call) -> None:
        """Record a call of a tool, in the sequence with the last request."""
        sequence = max(self._chains.sequences, key=lambda each: each.last_request, default=None)
        if sequence is None:
            self._early_calls.append(call)
            return
        self._hand_over_calls(sequence.rollout)
        call.turn = len(sequence.rollout.turns)
        sequence.rollout.calls.append(call)

    def _hand_over_calls(self, rollout: Rollout) -> None:
        rollout.calls += self._early_calls
        self._early_calls.clear()

    def _check(self, request: ModelRequest) -> None:
        self._ignore(request.ignored)
        if self.fault is not None:
            raise self.lose(self.fault)
        if request.tools and self.policy.call_format is None:
            raise WireError(
                "no tools: the policy's chat template has no known format of tool calls; set "
                "rollout.multi_turn.format",
                code="unsupported_value",
                param="tools",
            )
        if request.messages[-1]["role"] == "assistant":
            raise WireError(
                "the last message is the assistant's: the policy begins a message of its own and "
                "does not go on with one; leave it out",
                code="unsupported_value",
                param="messages",
            )

    def _temperature(self, request: ModelRequest) -> float:
        asked, common = request.temperature, self.temperature
        if asked is None or asked == common:
            return common
        # 0: the session is greedy, as the baseline of `remax`
        if common == 0 or "temperature" not in self.policy.agent_may_set:
            self._ignore(["temperature"])
            return common
        if asked <= 0:
            raise WireError(
                f"temperature={asked}: tokens that are trained are sampled; want a number above 0",
                param="temperature",
            )
        return asked

    async def _say(
        self, request: ModelRequest, continuation: Continuation
    ) -> tuple[ModelReply, dict[str, Any]]:
        sequence, codec = continuation.sequence, self.policy.codec
        rollout = sequence.rollout
        trajectory = rollout.trajectory
        if self._requests >= self.max_requests:
            raise self._out_of_turns(
                f"this session has had its {self.max_requests} messages of the model (max_requests "
                "of the agent)"
            )
        if sequence.turns >= self.budget.max_turns:
            raise self._out_of_turns(
                f"this conversation has had its {self.budget.max_turns} messages of the model "
                "(max_turns of the source)"
            )
        room = self._room(trajectory) - len(continuation.added)
        if room <= 0:
            raise self._used_up(
                StopReason.RESPONSE_BUDGET,
                f"the conversation has {continuation.read} tokens, and no room for an answer is "
                "left",
                code="context_length_exceeded",
            )
        self._requests += 1  # nothing was awaited since the check, so there is one left
        sequence.last_request = self._requests
        self._hand_over_calls(rollout)
        if continuation.added:
            trajectory.add_tool_tokens(continuation.added, codec.decode(continuation.added))
        own = (
            self.policy.call_format.stop_texts if request.tools and self.policy.call_format else ()
        )
        language = _Stops([*own, *request.stop])
        turn = Turn(read_tokens=continuation.read, reused_tokens=continuation.reused)
        rollout.turns.append(turn)
        own_limit = min(room, self.budget.max_turn_length or room)
        limit = min(own_limit, request.max_tokens or own_limit)
        texts = language.stop_texts
        stop = Stop(texts=tuple(texts), token_ids=tuple(stop_token_ids(texts, codec.encode)))
        prompt_ids = trajectory.ids
        in_reasoning = prompt_opens_thought(codec, prompt_ids)
        is_guided = self.policy.is_guided and not can_call(request) and not in_reasoning
        started = time.monotonic()
        self._generating += 1
        self._wind_up()
        try:
            generated = await self.engine(
                prompt_ids,
                max_tokens=limit,
                stop=stop,
                temperature=sequence.temperature,
                sequence=sequence.id,
                schema=request.answer_schema if is_guided else None,
            )
        finally:
            turn.generate_s = time.monotonic() - started
            waits_for("agent")
            self._generating -= 1
            self._wind_up()
        turn.min_global_steps = generated.min_global_steps
        turn.max_global_steps = generated.max_global_steps
        turn.request = generated.request
        text, is_whole = append_turn(trajectory, generated, language, codec)
        turn.tokens = trajectory.segments[-1].length
        self.is_cut = not is_whole and turn.tokens >= own_limit
        if self.exhausted != StopReason.MAX_TURNS:  # an agent may compact its context and go on
            self.exhausted = StopReason.RESPONSE_BUDGET if self.is_cut else None
        told = self._told(request, text, trajectory, continuation.read, is_whole, in_reasoning)
        turn.misfit = await misfit(request, told[0])
        return told

    def _room(self, trajectory: Trajectory) -> int:
        """Tokens that a sequence may still have. A prompt longer than `prompt_length` has less."""
        length = self.budget.response_length
        over = max(0, len(trajectory.prompt_ids) - self.policy.prompt_length)
        return length - over - len(trajectory)

    def _told(
        self,
        request: ModelRequest,
        text: str,
        trajectory: Trajectory,
        read: int,
        is_whole: bool,
        in_reasoning: bool,
    ) -> tuple[ModelReply, dict[str, Any]]:
        """The reply, and the same as the message that the agent will send back."""
        found = [(at, stop) for stop in request.stop if (at := text.find(stop)) >= 0]
        at, stop_text = min(found, default=(len(text), None))
        text = text[:at]
        content, reasoning, calls = text, "", list[ReplyCall]()
        if self.policy.call_format is not None:
            schemas = {
                tool["function"]["name"]: tool["function"].get("parameters") or {}
                for tool in request.tools
            }
            message = self.policy.call_format.parse(text, schemas, in_reasoning=in_reasoning)
            content, reasoning = message.content, message.reasoning
            takes_calls = can_call(request)
            unread = list[str]()
            for attempt in message.calls:
                may_call = takes_calls and (request.parallel_tool_calls or not calls)
                if isinstance(attempt, CallMistake) or not may_call:
                    unread.append(attempt.text)  # the agent sees what the model wrote
                    continue
                own_id = attempt.call_id or new_call_id(self._calls)
                self._calls += 1
                arguments = json.dumps(attempt.arguments, ensure_ascii=False)
                calls.append(ReplyCall(id=own_id, name=attempt.name, arguments=arguments))
            content = "\n".join(filter(None, [content, *unread]))
        finish: Finish = "tool_calls" if calls else "stop" if is_whole else "length"
        reply = ModelReply(
            id=uuid4().hex,
            created=int(time.time()),
            model=request.model,
            content=content,
            reasoning=reasoning,
            calls=tuple(calls),
            finish=finish,
            stop_text=stop_text,
            prompt_tokens=read,
            completion_tokens=trajectory.segments[-1].length,
            logprobs=self._logprobs(trajectory) if request.logprobs else None,
            answer_schema=request.answer_schema,
        )
        return reply, _message_of(reply)

    def _logprobs(self, trajectory: Trajectory) -> tuple[TokenLogprob, ...]:
        """Of the last turn."""
        last = trajectory.segments[-1]
        own = slice(last.start, last.start + last.length)
        texts = [self.policy.codec.decode([each]) for each in trajectory.response_ids[own]]
        return tuple(
            TokenLogprob(text=text, raw=text.encode(errors="replace"), logprob=log_prob)
            for text, log_prob in zip(texts, trajectory.log_probs[own], strict=True)
        )

    def _ignore(self, names: Iterable[str]) -> None:
        """Note fields that have no effect; an agent may make up any number of names."""
        for name in names:
            if len(self.ignored) < MOST_IGNORED:
                self.ignored.add(name[:80])

    def _used_up(self, reason: StopReason, words: str, code: str = "budget") -> WireError:
        self.exhausted, self.is_cut = reason, False
        return WireError(f"{words}; end the session with what there is", code=code)

    def _out_of_turns(self, words: str) -> WireError:
        error = self._used_up(StopReason.MAX_TURNS, words)
        if self._end is None:
            self._wind_up()
        return error

    def _wind_up(self) -> None:
        """Stop the agent a little later if it is told to end, and only then."""
        if self._end is not None:
            self._end.cancel()
        loop = asyncio.get_running_loop()
        self._end = loop.call_later(WIND_UP_S, self.over.set) if self.is_told_to_end else None

    def lose(self, error: Fault) -> WireError:
        """The engine or a tool failed: the session is lost, whatever the agent does."""
        self.fault = self.fault or error
        self.over.set()
        return WireError(f"the infrastructure failed: {error}", status=503, code="unavailable")

    @property
    def has_verdict(self) -> bool:
        """Whether there is an answer or a reward."""
        return self.answer is not None or self.reward is not None

    def take_post(self, said: Mapping[str, Any]) -> None:
        """As `set_verdict`, of what was posted.

        Raises:
            WireError: also if the source does not leave its reward to the agent.
        """
        if said.get("reward") is not None and not self.takes_reward:
            raise WireError(
                "no reward: mixed.sources.<name>.reward does not leave it to the agent; set it to "
                '`loop`, or post {"answer": a text}',
                status=403,
                code="forbidden",
                param="reward",
            )
        self.set_verdict(said)

    def set_verdict(self, said: Mapping[str, Any]) -> None:
        """Take the answer or the reward of the agent.

        Raises:
            WireError: the answer is no text, or the reward is none (`reward_number`).
        """
        answer, reward = said.get("answer"), said.get("reward")
        number = reward_number(reward)
        if (
            (answer is None and reward is None)
            or not isinstance(answer, str | None)
            or (number is None and reward is not None)
        ):
            raise WireError(
                f'got {shown(said)}: want {{"answer": a text}}, or {{"reward": {WANTED}}}, or both'
            )
        self.answer = self.answer if answer is None else answer
        self.reward = self.reward if number is None else number


def _message_of(reply: ModelReply) -> dict[str, Any]:
    calls = [call_of(each.id, each.name, json.loads(each.arguments)) for each in reply.calls]
    return assistant_message([reply.content], filter(None, [reply.reasoning]), calls)
