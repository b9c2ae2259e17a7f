"""A tokenizer of characters, an engine that plays a script, and tools that answer from a table."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from agent_loop.records.trajectory_record import (
    TrajectoryRecord,
    add_texts,
    from_columns,
    to_columns,
)
from agent_loop.turns.codec import TokenCodec
from agent_loop.turns.tags import Action
from agent_loop.turns.turn_loop import Generated, Observation, Rollout, Stop
from tool_server.wire.protocol import ToolResult, ToolUnavailable

END = "<|end|>"
"""Ends a message, where it is a token."""


class CharTokenizer:
    """One token a character; a piece named in `wide` is one token of its own."""

    def __init__(self, wide: Sequence[str] = ()) -> None:
        self.wide = {piece: 0x110000 + i for i, piece in enumerate(wide)}
        self.end_ids = frozenset({self.wide[END]} if END in self.wide else ())

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        while text:
            piece = next((p for p in self.wide if text.startswith(p)), text[0])
            ids.append(self.wide.get(piece, ord(piece[0])))
            text = text[len(piece) :]
        return ids

    encode_plain = encode

    def decode(self, token_ids: Sequence[int]) -> str:
        pieces = {number: piece for piece, number in self.wide.items()}
        return "".join(pieces[i] if i in pieces else chr(i) for i in token_ids)


class ScriptedGenerate:
    """Plays one turn after the other, within `max_tokens`, and records what it was asked.

    Args:
        codec: turns the script into tokens.
        turns: what the model says, turn by turn: text, or the tokens.
        stops_at: what an engine can stop at, besides the end of the message: the token ids that it
            is given, the texts (behind the token that completes one), or nothing.
    """

    def __init__(
        self,
        codec: TokenCodec,
        turns: Sequence[str | list[int]],
        stops_at: Literal["token_ids", "texts", "nothing"] = "token_ids",
    ) -> None:
        self.codec, self.turns, self.stops_at = codec, list(turns), stops_at
        self.asked: list[tuple[list[int], int]] = []

    async def __call__(self, prompt_ids: list[int], *, max_tokens: int, stop: Stop) -> Generated:
        self.asked.append((list(prompt_ids), max_tokens))
        said = self.turns.pop(0)
        ids = (self.codec.encode(said) if isinstance(said, str) else said)[:max_tokens]
        ends = (n for n in range(1, len(ids) + 1) if self._is_over(ids[:n], stop))
        ids = ids[: next(ends, len(ids))]
        return Generated(token_ids=ids, log_probs=[-0.5 - i / 1000 for i in range(len(ids))])

    def _is_over(self, ids: list[int], stop: Stop) -> bool:
        if ids[-1] in self.codec.end_ids:
            return True
        if self.stops_at == "texts":
            said = self.codec.decode(ids)
            return any(text in said for text in stop.texts)
        return self.stops_at == "token_ids" and ids[-1] in stop.token_ids


class TableEnvironment:
    """Answers an action with the text of a table; None is a dead tool."""

    def __init__(self, table: dict[str, str | None]) -> None:
        self.table = table
        self.seen: list[Action] = []

    async def __call__(self, action: Action) -> Observation:
        self.seen.append(action)
        text = self.table[action.content]
        if text is None:
            raise ToolUnavailable("no answer from http://127.0.0.1:9: 3 attempts")
        return Observation(text=text, result=ToolResult(body={}, latency_s=0.25))


def trained_of(rollout: Rollout, source: str = "nq", uid: str = "u") -> TrajectoryRecord:
    """Its record, as the trainer reads it back, without texts and tokens."""
    trajectory = rollout.trajectory
    record = from_columns(to_columns(rollout.record())[0])
    record.key, record.source, record.row_id = f"{uid}_0_0", source, f"{source}:0"
    record.prompt_tokens, record.response_tokens = len(trajectory.prompt_ids), len(trajectory)
    record.trained_tokens = sum(trajectory.response_mask)
    return record


def whole_of(rollout: Rollout, source: str = "nq", uid: str = "u") -> TrajectoryRecord:
    """The same with texts and tokens, as a line of a trajectory file has them."""
    trajectory, record = rollout.trajectory, trained_of(rollout, source, uid)
    add_texts(record, to_columns(rollout.record())[1])
    record.prompt_ids, record.response_ids = trajectory.prompt_ids, [*trajectory.response_ids]
    record.response_mask = [*trajectory.response_mask]
    record.log_probs = [*trajectory.log_probs]
    return record


def record_in(fields: Mapping[str, Any]) -> TrajectoryRecord:
    """The record in verl's columns of a row, with its texts and tokens."""
    record = from_columns(fields["extra_fields"]["mixed"])
    add_texts(record, fields["mixed_texts"])
    record.prompt_ids = fields["prompts"].tolist()
    record.response_ids = fields["responses"].tolist()
    record.response_mask = fields["response_mask"].tolist()
    record.log_probs = fields["rollout_log_probs"].tolist()
    return record
