"""The conversations of one gateway session: which request continues which sequence, and what a
template adds between.

An agent sends its whole history with each request. If it begins with the messages of a sequence,
and the model's messages in it are those that the gateway sent, the sequence goes on: its tokens
stay as they are, and only the tokens of the new messages are added. Any other request begins a
sequence, whose prompt is rendered from its messages. So what an agent changed in its history is
read by the model and never trained. Pure: the template is given as an object.

Example: an agent asks [user], gets A, asks [user, A, result], gets B, and then asks [user, A, other
result]. The first two requests are one sequence. The third begins another: its prompt has the
tokens of [user] and A as they were sampled, and then those of the other result. It is the second
turn of its conversation, because A is the first.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from itertools import accumulate
from typing import Any
from uuid import uuid4

import msgspec

from agent_loop.gateway.demands import demand_of, with_demand
from agent_loop.gateway.template import ChatTemplate, Messages, Tools
from agent_loop.gateway.wire import ModelRequest
from agent_loop.records.trajectory_record import StopReason
from agent_loop.turns.observation_style import LONG_TEXT
from agent_loop.turns.tool_messages import CannotContinue, shared_length
from agent_loop.turns.trajectory import Trajectory
from agent_loop.turns.turn_loop import Rollout


@dataclass(eq=False, slots=True, kw_only=True)
class OpenSequence:
    """A sequence under way."""

    rollout: Rollout
    tools: bytes
    """The tools in its prompt, as a comparable text."""

    temperature: float
    """At which all its tokens are sampled."""

    history: list[bytes] = field(default_factory=list[bytes])
    """Its messages as comparable texts, those of the model included."""

    digest: bytes = b""
    """Of its tools, its temperature and its messages."""

    turns_before: int = 0
    """Turns of its conversation that its prompt holds."""

    examples: int = 0
    """Messages of the role assistant in its prompt that are no turns: few-shot examples."""

    demand: str = ""
    """What the policy was told last of the form of its messages; see `demands`."""

    id: str = field(default_factory=lambda: uuid4().hex)
    is_busy: bool = False
    """Whether the engine is writing its next message."""

    last_request: int = 0

    @property
    def turns(self) -> int:
        """Turns of its conversation so far."""
        return self.turns_before + len(self.rollout.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    """A place in a sequence after a message of the model."""

    sequence: OpenSequence
    response_tokens: int
    said: Mapping[str, Any]
    demand: str

    @property
    def tokens(self) -> list[int]:
        """Those of the sequence until there."""
        trajectory = self.sequence.rollout.trajectory
        return trajectory.ids[: len(trajectory.prompt_ids) + self.response_tokens]

    @property
    def is_end(self) -> bool:
        return self.response_tokens == len(self.sequence.rollout.trajectory)


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """Where a request goes on."""

    sequence: OpenSequence
    added: list[int]
    """Tokens of the environment to append to the sequence before the engine goes on."""

    read: int
    """Tokens of the prompt that the engine reads."""

    reused: int
    """Those of them that earlier requests of the session had."""


class Chains:
    """The sequences of one session."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self.sequences: list[OpenSequence] = []
        self._points: dict[bytes, _Point] = {}
        self._said = set[bytes]()
        """The model's messages, as comparable texts."""

    async def place(self, request: ModelRequest, temperature: float) -> Continuation:
        """Find the sequence that a request continues, or begin one; it is busy until `say`.

        Long messages are tokenised in a thread; meanwhile other requests may go on from the same
        place, and then this one is a branch.

        Raises:
            WireError: the template refuses the messages.
        """
        messages, tools = request.messages, _text_of(request.tools)
        demand, texts = demand_of(request), texts_of(messages)
        digests = _digests(_digest(tools + b" %r" % temperature), texts)
        known = (at for at in range(len(messages) - 1, 0, -1) if digests[at - 1] in self._points)
        count = next(known, 0)
        try:
            point = self._points[digests[count - 1]] if count else None
            new = with_demand(messages[count:], demand, point.demand if point else "")
            ids = await self._tokens_of(point, new, messages[:count], request.tools)
        except CannotContinue:
            point, new = None, with_demand(messages, demand)
            ids = await self._tokens_of(None, new, [], request.tools)
        before, added = point.tokens if point else [], list[int]()
        read = len(before) + len(ids)
        if point is not None and not point.sequence.is_busy and point.is_end:
            sequence, added = point.sequence, ids
        else:
            if point is not None:  # an earlier place of the sequence
                cause, parent, shared = "branch", point.sequence, count
            else:
                cause, parent, shared = self._why_new(texts, tools, temperature)
            turns_before, examples = self._turns_behind(messages, texts, shared, parent)
            rollout = Rollout(
                trajectory=Trajectory(before + ids),
                stop_reason=StopReason.ANSWERED,
                answer=None,
                cause=cause,
                temperature=temperature,
            )
            rollout.parent = parent.rollout if parent is not None else None
            sequence = OpenSequence(
                rollout=rollout,
                tools=tools,
                temperature=temperature,
                turns_before=turns_before,
                examples=examples,
            )
            self.sequences.append(sequence)
        sequence.history, sequence.digest, sequence.is_busy = texts, digests[-1], True
        sequence.demand = demand
        return Continuation(sequence=sequence, added=added, read=read, reused=len(before))

    async def _tokens_of(
        self, point: _Point | None, new: Messages, before: Messages, tools: Tools
    ) -> list[int]:
        """The tokens of messages: of a whole prompt, or after the messages before a point. Those of
        long ones are made in a thread."""
        if point is None:
            work = partial(self._template.prompt_ids, new, tools)
        else:
            thinks = any(message.get("reasoning_content") for message in before)
            work = partial(
                self._template.glue_ids, point.said, new, tools, point.tokens[-1], thinks
            )
        if sum(len(message.get("content") or "") for message in new) > LONG_TEXT:
            return await asyncio.to_thread(work)
        return work()

    def say(self, sequence: OpenSequence, said: Mapping[str, Any] | None) -> None:
        """Note the model's message as the agent was told, after it was appended to the sequence;
        None if the engine failed."""
        sequence.is_busy = False
        if said is None:
            if not sequence.rollout.turns:  # the request was refused before the engine was asked
                self.sequences.remove(sequence)
            return
        texts = texts_of([said])
        self._said.update(texts)
        sequence.history = [*sequence.history, *texts]
        sequence.digest = _digests(sequence.digest, texts)[-1]
        response_tokens = len(sequence.rollout.trajectory)
        self._points[sequence.digest] = _Point(
            sequence=sequence,
            response_tokens=response_tokens,
            said=said,
            demand=sequence.demand,
        )

    def _turns_behind(
        self,
        messages: Messages,
        texts: Sequence[bytes],
        shared: int,
        parent: OpenSequence | None,
    ) -> tuple[int, int]:
        """Turns that a request has behind it which begins a sequence, and examples before them.

        An agent may write the model's messages anew, and has had them all the same. So messages of
        the role assistant after those that it shares with `parent` count as turns, but no more
        than `parent` has had. Without a `parent`, only words that the model said count.
        """
        written = [message["role"] == "assistant" for message in messages]
        if parent is None:
            turns = sum(text in self._said for text in texts)
        else:
            examples = min(parent.examples, sum(written[:shared]))
            turns = min(parent.turns, sum(written) - examples)
        return turns, sum(written) - turns

    def _why_new(
        self, texts: Sequence[bytes], tools: bytes, temperature: float
    ) -> tuple[str, OpenSequence | None, int]:
        """Why a request begins a sequence, the one with which it shares the most messages, and how
        many."""
        if not self.sequences:
            return "", None, 0
        shared = [
            (shared_length(texts, sequence.history), sequence.last_request, sequence)
            for sequence in self.sequences
        ]
        count, _, sequence = max(shared, key=lambda each: each[:2])
        if not count:
            return "new conversation", None, 0
        if count < min(len(texts), len(sequence.history)):
            ours, theirs = (msgspec.json.decode(each[count]) for each in (sequence.history, texts))
            if ours["role"] != "assistant" or theirs["role"] != "assistant":
                cause = "new messages"
            elif {**ours, "reasoning": ""} == {**theirs, "reasoning": ""}:
                cause = "reasoning"
            else:
                cause = "rewritten"
            return cause, sequence, count
        if sequence.tools != tools:
            return "tools", sequence, count
        if sequence.temperature != temperature:
            return "temperature", sequence, count
        return "again" if count == len(texts) else "template", sequence, count


def texts_of(messages: Messages) -> list[bytes]:
    """Messages as texts to compare. An id of a call counts as the number of its call, because some
    clients rename ids; blanks around what the model said do not count."""
    texts, numbers = list[bytes](), dict[str, int]()
    for message in messages:
        said = {"role": message["role"], "content": message.get("content") or ""}
        if message["role"] == "assistant":
            said["content"] = said["content"].strip()
            said["reasoning"] = (message.get("reasoning_content") or "").strip()
            calls = message.get("tool_calls") or ()
            functions = [call["function"] for call in calls]
            said["calls"] = [{"name": f["name"], "arguments": f["arguments"]} for f in functions]
            numbers = {call["id"]: number for number, call in enumerate(calls)}
        elif message["role"] == "tool":
            said["call"] = numbers.get(message["tool_call_id"])
        texts.append(_text_of(said))
    return texts


def _text_of(value: Any) -> bytes:
    return msgspec.json.encode(value, order="deterministic")


def _digest(text: bytes) -> bytes:
    return blake2b(text, digest_size=16).digest()


def _digests(before: bytes, texts: Sequence[bytes]) -> list[bytes]:
    """A digest of each beginning of a conversation that goes on with these texts."""
    return list(accumulate(texts, lambda digest, text: _digest(digest + text), initial=before))[1:]
