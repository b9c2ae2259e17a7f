"""Tokens of tool results, between the tokens that markers or a chat template put around them.

A result that is too long is cut in the middle, between whole characters, and gets a visible mark.
`fit_between` does this for every glue. No verl, no torch.
"""

import asyncio
from collections.abc import Callable, Sequence

from agent_loop.turns.codec import TokenCodec
from agent_loop.turns.tool_messages import Glue, written

CUT_MARK = "..."
BROKEN = "\ufffd"  # bytes that are not a whole character decode to this

LONG_TOKEN = 16
"""A huge result is first cut as text, to so many characters for each token of room."""

LONG_TEXT = 20_000
"""Characters of results above which a thread makes their tokens. A tokenizer takes 1 to 2 us for
each, and the event loop must go on after 50 ms."""


GlueOf = Callable[[int], Glue]
"""How results enter the response: what is put around so many results of one turn's actions."""


def inline_glue(codec: TokenCodec, opening: str, closing: str) -> GlueOf:
    """Each result between two texts, in the assistant's own message (ReTool, Feng et al. 2025;
    Search-R1, Jin et al. 2025)."""
    before, after = tuple(codec.encode(opening)), tuple(codec.encode(closing))

    def glue(count: int) -> Glue:
        pieces = (before, *[after + before] * (count - 1), after)
        return Glue(end_id=None, pieces=pieces, writings=("plain",) * count)

    return glue


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


async def fit_between(
    glue: Glue,
    results: Sequence[str],
    codec: TokenCodec,
    *,
    last_id: int,
    room: int,
    max_length: int | None,
) -> list[int] | None:
    """The tokens of the results between the pieces of the glue, cut so that all together are `room`
    at most; None if the glue does not fit, or nothing would be left of a result.

    Args:
        last_id: the last token of the turn.
        max_length: tokens of one result; None: as many as fit.
    """
    if sum(map(len, results)) > LONG_TEXT:
        return await asyncio.to_thread(
            _fit_between, glue, results, codec, last_id, room, max_length
        )
    return _fit_between(glue, results, codec, last_id, room, max_length)


def _fit_between(
    glue: Glue,
    results: Sequence[str],
    codec: TokenCodec,
    last_id: int,
    room: int,
    max_length: int | None,
) -> list[int] | None:
    space = left = room - glue.length(last_id)
    most = max_length
    while left >= 0:
        inner = _fit(results, codec, left, most)
        if inner is None:
            return None
        inner = [
            own if writing == "plain" else codec.encode_plain(written(codec.decode(own), writing))
            for own, writing in zip(inner, glue.writings, strict=True)
        ]
        used = sum(map(len, inner))
        over = 0 if max_length is None else max(map(len, inner), default=0) - max_length
        if over > 0 and most is not None and most > 1:
            most = max(1, most - over)  # written as JSON, it is longer
        elif used > space:
            left -= used - space
        else:
            return glue.around(inner, last_id)
    return None


def _fit(
    results: Sequence[str], codec: TokenCodec, room: int, max_length: int | None
) -> list[list[int]] | None:
    """The tokens of several results, cut so that all together are `room` at most; None if nothing
    would be left of one."""
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
