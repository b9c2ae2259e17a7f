"""A tokenizer of characters, an engine that plays a script, and tools that answer from a table."""

from collections.abc import Sequence

from agent_loop.tags import Action
from agent_loop.tools.protocol import ToolResult, ToolUnavailable
from agent_loop.turn_loop import Generated, Observation


class CharTokenizer:
    """One token a character; a piece named in `wide` is one token of its own."""

    def __init__(self, wide: Sequence[str] = ()) -> None:
        self.wide = {piece: 0x110000 + i for i, piece in enumerate(wide)}

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        while text:
            piece = next((p for p in self.wide if text.startswith(p)), text[0])
            ids.append(self.wide.get(piece, ord(piece[0])))
            text = text[len(piece) :]
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        pieces = {number: piece for piece, number in self.wide.items()}
        return "".join(pieces[i] if i in pieces else chr(i) for i in token_ids)


class ScriptedGenerate:
    """Plays one text a turn, within `max_tokens`, and records what it was asked.

    Args:
        codec: turns the script into tokens.
        turns: what the model says, turn by turn. A real engine stops at a stop token; so does this.
    """

    def __init__(self, codec: CharTokenizer, turns: Sequence[str]) -> None:
        self.codec, self.turns = codec, list(turns)
        self.asked: list[tuple[list[int], int]] = []

    async def __call__(
        self, prompt_ids: list[int], *, max_tokens: int, stop_token_ids: list[int]
    ) -> Generated:
        self.asked.append((list(prompt_ids), max_tokens))
        ids = self.codec.encode(self.turns.pop(0))[:max_tokens]
        for at, token_id in enumerate(ids):
            if token_id in stop_token_ids:
                ids = ids[: at + 1]
                break
        return Generated(token_ids=ids, log_probs=[-0.5 - i / 1000 for i in range(len(ids))])


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
