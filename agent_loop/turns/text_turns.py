"""Turns in which the whole message of the model is one action, and the answer is a user's message.

For environments: the model writes text, the environment answers. `TextDialogue` reads the message
and writes the answer as the chat template does (`agent_loop.turns.tool_messages`). No verl, no
torch.
"""

from collections.abc import Sequence

from agent_loop.turns.codec import TokenCodec
from agent_loop.turns.native import THOUGHTS, NativeDialogue, opens_thought
from agent_loop.turns.observation_style import RenderedResults, fit
from agent_loop.turns.tags import Action, ActionKind
from agent_loop.turns.tool_messages import ToolMessages, written

STEP = "step"
"""Kind of the action of a message; its content is the text."""


class TextDialogue:
    """A `Language` and an `ObservationStyle` in one.

    Args:
        messages: the template's glue around a user's message.
        codec: of the tokenizer.
        max_length: tokens of one answer of the environment; None: as many as fit.
        in_reasoning: whether the prompt's end opens a thought.
    """

    def __init__(
        self,
        messages: ToolMessages,
        codec: TokenCodec,
        *,
        max_length: int | None = None,
        in_reasoning: bool = False,
    ) -> None:
        self._messages, self._codec, self._max_length = messages, codec, max_length
        self._in_reasoning = in_reasoning

    @property
    def stop_texts(self) -> list[str]:
        return []

    def find_end(self, text: str) -> int:
        return -1

    def actions(self, text: str, *, is_whole: bool = True) -> list[Action]:
        """The message without its thoughts, as one action; none if nothing else is in it."""
        said = without_thoughts(text, in_reasoning=self._in_reasoning)
        return [Action(kind=STEP, content=said, is_open=True)] if said else []

    async def show(
        self, turn_text: str, results: Sequence[str], ids: Sequence[int], room: int
    ) -> RenderedResults | None:
        """The end of the model's message, the answer as a user's message, and the beginning of the
        next assistant's message."""
        glue = self._messages.glue((), ("user",))
        end = [] if ids[-1] == glue.end_id else [glue.end_id]
        space = left = room - glue.length - len(end)
        while left >= 0:
            cut = await fit(["\n".join(results)], self._codec, left, self._max_length)
            if cut is None:
                return None
            inner, writing = cut[0], glue.writings[0]
            if writing != "plain":
                text = written(self._codec.decode(inner), writing)
                inner = self._codec.encode_plain(text)
            if len(inner) <= space:
                token_ids = [*end, *glue.pieces[0], *inner, *glue.pieces[1]]
                self._in_reasoning = opens_thought(self._codec.decode(glue.pieces[1]))
                return RenderedResults(token_ids=token_ids, text=self._codec.decode(token_ids))
            left -= len(inner) - space
        return None


class CallsAndText:
    """The dialogue of native calls, in which a message without calls is an action too.

    Args:
        dialogue: reads and writes the calls.
        text: reads and writes messages without calls.
    """

    def __init__(self, dialogue: NativeDialogue, text: TextDialogue) -> None:
        self._calls, self._text = dialogue, text
        self._last_was_text = False

    @property
    def stop_texts(self) -> list[str]:
        return self._calls.stop_texts

    def find_end(self, text: str) -> int:
        return self._calls.find_end(text)

    def actions(self, text: str, *, is_whole: bool = True) -> list[Action]:
        found = self._calls.actions(text, is_whole=is_whole)
        self._last_was_text = [each.kind for each in found] == [ActionKind.ANSWER]
        if self._last_was_text:
            return [Action(kind=STEP, content=found[0].content, is_open=True)]
        return found

    async def show(
        self, turn_text: str, results: Sequence[str], ids: Sequence[int], room: int
    ) -> RenderedResults | None:
        style = self._text if self._last_was_text else self._calls
        return await style.show(turn_text, results, ids, room)


def without_thoughts(text: str, *, in_reasoning: bool = False) -> str:
    """A message without the thought at its beginning, stripped. A thought that does not end takes
    the whole message.

    >>> without_thoughts("<think>maybe 3</think> [3]")
    '[3]'
    """
    said = text.strip()
    for start, end in THOUGHTS:
        if said.startswith(start) or (in_reasoning and end in said):
            _, found, rest = said.partition(end)
            return rest.strip() if found else ""
    return "" if in_reasoning else said
