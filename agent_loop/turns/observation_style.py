"""Tokens of tool results: in the assistant's message (`inline`) or as own messages (`chat`).

A result that is too long is cut in the middle, between whole characters, and gets a visible mark.
No verl, no torch: the chat template is given as a function.

`inline`: markers around the result in the assistant's message (ReTool, Feng et al. 2025; Search-R1,
Jin et al. 2025). `chat`: a message of the role `tool`, through verl's continuous-token builder.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from agent_loop.turns.codec import TokenCodec

CUT_MARK = "..."
BROKEN = "\ufffd"  # bytes that are not a whole character decode to this

LONG_TOKEN = 16
"""A huge result is first cut as text, to so many characters for each token of room."""

LONG_TEXT = 20_000
"""Characters of results above which a thread makes their tokens. A tokenizer takes 1 to 2 us for
each, and the event loop must go on after 50 ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedResults:
    """An observation as it enters the response."""

    token_ids: list[int]  # (t,)
    text: str
    drop: int = 0
    """Tokens that the template removes from the end of the model's turn."""


class ObservationStyle(Protocol):
    """Makes tokens of the results of one turn's actions."""

    async def show(
        self, turn_text: str, results: Sequence[str], ids: Sequence[int], room: int
    ) -> RenderedResults | None:
        """Tokens for the results of a turn, at most `room`; None if not even the markers fit.

        Args:
            turn_text: the model's text of this turn, as the loop acted on it.
            results: the texts of the actions' results, in order.
            ids: prompt and response so far.
        """
        ...


def cut_middle(text: str, codec: TokenCodec, room: int) -> list[int]:
    """The tokens of a text; if it has more than `room`, its first and last tokens around a mark.

    With room for 7 tokens, `1 2 3 4 5 6 7 8 9` becomes `1 2 3 ... 7 8 9`, if the mark is one token.

    More than `2 * LONG_TOKEN` characters for each token of room are too long, whatever their tokens
    are. There is no token if not even the mark fits.
    """
    reach = LONG_TOKEN * max(1, room)
    if len(text) > 2 * reach:  # the tokenizer would need seconds for megabytes
        first, last = codec.encode_plain(text[:reach]), codec.encode_plain(text[-reach:])
    else:
        first = last = codec.encode_plain(text)
        if len(first) <= room:
            return first
    mark = codec.encode_plain(CUT_MARK)
    left = room - len(mark)
    if left < 0:
        return []
    head, tail = first[: (left + 1) // 2], last[max(0, len(last) - left // 2) :]
    # U+FFFD may be a character of the text itself.
    while head and (shown := codec.decode(head)).endswith(BROKEN) and not text.startswith(shown):
        head.pop()
    while tail and (shown := codec.decode(tail)).startswith(BROKEN) and not text.endswith(shown):
        tail.pop(0)
    return head + mark + tail


def share_room(lengths: Sequence[int], room: int) -> list[int]:
    """Share `room` among several results. The longest results are cut first.

    Lengths 2, 10 and 20 with room for 16 get 2, 7 and 7.
    """
    shares = [0] * len(lengths)
    for rank, at in enumerate(sorted(range(len(lengths)), key=lambda i: lengths[i])):
        shares[at] = min(lengths[at], room // (len(lengths) - rank))
        room -= shares[at]
    return shares


class InlineStyle:
    """Each result between the texts `opening` and `closing`, in the assistant's own message.

    Args:
        max_length: tokens of one result without markers; None: as many as fit.
    """

    def __init__(
        self, codec: TokenCodec, opening: str, closing: str, max_length: int | None = None
    ) -> None:
        self._codec, self._max_length = codec, max_length
        self._opening, self._closing = codec.encode(opening), codec.encode(closing)

    async def show(
        self, turn_text: str, results: Sequence[str], ids: Sequence[int], room: int
    ) -> RenderedResults | None:
        around = len(self._opening) + len(self._closing)
        left = room - around * len(results)
        if left < 0:
            return None
        inner = await fit(results, self._codec, left, self._max_length)
        if inner is None:
            return None
        token_ids = [t for own in inner for t in (*self._opening, *own, *self._closing)]
        return RenderedResults(token_ids=token_ids, text=self._codec.decode(token_ids))


async def fit(
    results: Sequence[str], codec: TokenCodec, room: int, max_length: int | None
) -> list[list[int]] | None:
    """The tokens of several results, cut so that all together are `room` at most; None if nothing
    would be left of one."""
    if sum(map(len, results)) > LONG_TEXT:
        return await asyncio.to_thread(_fit, results, codec, room, max_length)
    return _fit(results, codec, room, max_length)


def _fit(
    results: Sequence[str], codec: TokenCodec, room: int, max_length: int | None
) -> list[list[int]] | None:
    cap = room if max_length is None else min(room, max_length)
    inner = [cut_middle(text, codec, cap) for text in results]
    if sum(map(len, inner)) > room:
        shares = share_room([len(own) for own in inner], room)
        inner = [
            own if len(own) <= cut else cut_middle(text, codec, cut)
            for own, text, cut in zip(inner, results, shares, strict=True)
        ]
    is_lost = any(text and not own for text, own in zip(results, inner, strict=True))
    return None if is_lost else inner


Render = Callable[[str, Sequence[str], Sequence[int]], tuple[list[int], int]]
"""(text of the turn, tool messages, ids so far) -> (tokens to append, tokens to remove before)."""


class ChatStyle:
    """Each result as a message of its own, with the tokens that the chat template puts around it.

    Args:
        render: the chat template.
        keep: is called with the text of the turn and the results that were added to the response.
        max_length: tokens of one result; None: as many as fit.
    """

    def __init__(
        self,
        codec: TokenCodec,
        render: Render,
        keep: Callable[[str, Sequence[str]], None] = lambda turn_text, texts: None,
        max_length: int | None = None,
    ) -> None:
        self._codec, self._render, self._keep = codec, render, keep
        self._max_length = max_length

    async def show(
        self, turn_text: str, results: Sequence[str], ids: Sequence[int], room: int
    ) -> RenderedResults | None:
        # Usually all results fit at once. Only if they do not, the template is rendered with empty
        # results, to measure the tokens around them. That costs as much as rendering with results.
        # Inside a template a text may have a token or two more at its edges.
        glue: int | None = None
        left = room
        while left >= len(self._codec.encode_plain(CUT_MARK)):
            inner = await fit(results, self._codec, left, self._max_length)
            if inner is None:
                return None
            texts = [self._codec.decode(own) for own in inner]
            token_ids, drop = self._render(turn_text, texts, ids)
            if len(token_ids) <= room:
                self._keep(turn_text, texts)
                return RenderedResults(
                    token_ids=token_ids, text=self._codec.decode(token_ids), drop=drop
                )
            if glue is None:
                glue = len(self._render(turn_text, [""] * len(results), ids)[0])
                left -= glue
            else:
                left -= len(token_ids) - room
        return None
