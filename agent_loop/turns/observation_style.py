"""How a tool's words enter the response: inside the same message, or as a message of their own.

Decides the tokens of an observation and how it is cut when it does not fit: in the middle, with a
visible mark, between whole characters. No verl, no torch: the chat template is a function.

`inline`: markers around the result in the assistant's message (ReTool, Feng et al. 2025; Search-R1,
Jin et al. 2025). `chat`: a message of the role `tool`, through verl's continuous-token builder.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jinja2 import TemplateError

CUT_MARK = "..."
BROKEN = "\ufffd"
"""What a decoder shows where a character is not whole."""

LONG_TOKEN = 16
"""Characters that one token of room is worth, when a huge result is pre-cut as text."""


class TokenCodec(Protocol):
    """The two directions of a tokenizer that a loop needs."""

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a message; they say nothing."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def encode_plain(self, text: str) -> list[int]:
        """As `encode`, but text that spells a control token stays text: a tool may print it."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


class HFCodec:
    """A Hugging Face tokenizer as `TokenCodec`: no special tokens added or dropped.

    It works on copies of its own of the fast tokenizer below. A call of the wrapper with
    `split_special_tokens` changes the one that all threads share: a thread that encodes meanwhile
    fails with "Already borrowed", or reads the other's setting. Copies are dear; see `codec_of`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.message_end_id: int | None = _message_end(tokenizer)
        """Ends an assistant's message in the chat template; eos where there is none."""

        ends = {self.message_end_id, tokenizer.eos_token_id}
        self.end_ids = frozenset(end for end in ends if end is not None)
        self._common = _copy_of(tokenizer, control_tokens=True)
        self._plain = _copy_of(tokenizer, control_tokens=False)

    def add_ends(self, token_ids: Sequence[int]) -> None:
        """Further tokens that end a message: engines stop at those of the generation config."""
        self.end_ids |= frozenset(token_ids)

    def encode(self, text: str) -> list[int]:
        return self._common.encode(text, add_special_tokens=False).ids

    def encode_plain(self, text: str) -> list[int]:
        whole = text.encode(errors="replace").decode()  # JSON may bring half a character
        return self._plain.encode(whole, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._common.decode(token_ids, skip_special_tokens=False)


def _message_end(tokenizer: Any) -> int | None:
    """The control token behind a message's content, which need not be eos: base models have
    another."""
    if not getattr(tokenizer, "chat_template", None):
        return tokenizer.eos_token_id
    try:
        rendered = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": "u"}, {"role": "assistant", "content": said}],
                tokenize=True,
                return_dict=False,
            )
            for said in ("a", "b")
        ]
    except TemplateError:  # it wants messages of another kind
        return tokenizer.eos_token_id
    same = 0
    while same < min(map(len, rendered)) and rendered[0][-1 - same] == rendered[1][-1 - same]:
        same += 1
    added = tokenizer.added_tokens_decoder
    tail = rendered[0][len(rendered[0]) - same :]
    control = [token for token in tail if token in added and added[token].special]
    return control[0] if control else tokenizer.eos_token_id


def _copy_of(tokenizer: Any, *, control_tokens: bool) -> Any:
    """The fast tokenizer below a wrapper.

    Raises:
        ValueError: there is none.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"tokenizer={type(tokenizer).__name__} is not a fast one: agent loops need it to keep "
            "a tool's text apart from control tokens; convert it to tokenizer.json"
        )
    own = copy.deepcopy(tokenizer.backend_tokenizer)
    own.no_truncation()
    own.no_padding()
    own.encode_special_tokens = not control_tokens
    return own


# The tokenizer itself is kept, because an id comes again once its object is gone.
_codecs: dict[int, tuple[Any, HFCodec]] = {}


def codec_of(tokenizer: Any) -> HFCodec:
    """This process's codec of a tokenizer, made on first use."""
    if id(tokenizer) not in _codecs:
        _codecs[id(tokenizer)] = tokenizer, HFCodec(tokenizer)
    return _codecs[id(tokenizer)][1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """An observation as it enters the response."""

    token_ids: list[int]  # (t,)
    text: str
    drop: int = 0
    """Tokens at the end of the model's turn that the template takes back."""


class ObservationStyle(Protocol):
    """Lays the results of one turn's actions out as tokens."""

    async def show(
        self, said: str, results: Sequence[str], ids: Sequence[int], room: int
    ) -> Shown | None:
        """Tokens for the results of a turn.

        Args:
            said: the turn's text, as the loop acted on it.
            results: what each action brought, in order.
            ids: prompt and response so far.
            room: tokens that all of it may take.

        Returns:
            None when not even the markers fit.
        """
        ...


def cut_middle(text: str, codec: TokenCodec, room: int) -> list[int]:
    """The tokens of a text, or its first and last ones around a mark, `room` at most.

    A text of more than `2 * LONG_TOKEN` characters a token of room counts as too long unread.

    Args:
        text: what a tool said, of any length.
        codec: the tokenizer.
        room: tokens; where not even the mark fits, there are none.
    """
    reach = LONG_TOKEN * max(1, room)
    if len(text) > 2 * reach:  # megabytes would take the tokenizer seconds
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
    while head and codec.decode(head).endswith(BROKEN) and not _ends_whole(text, head, codec):
        head.pop()
    while tail and codec.decode(tail).startswith(BROKEN) and not _begins_whole(text, tail, codec):
        tail.pop(0)
    return head + mark + tail


def _ends_whole(text: str, head: Sequence[int], codec: TokenCodec) -> bool:
    """Whether the broken-looking end is a character of the text itself."""
    return text.startswith(codec.decode(head))


def _begins_whole(text: str, tail: Sequence[int], codec: TokenCodec) -> bool:
    return text.endswith(codec.decode(tail))


def share_room(lengths: Sequence[int], room: int) -> list[int]:
    """Room for each of several results: none is cut before a longer one has given way.

    Args:
        lengths: tokens that each would take whole.
        room: tokens for all of them, >= 0.

    Returns:
        One share each, at most its length, together at most `room`.
    """
    shares = [0] * len(lengths)
    for rank, at in enumerate(sorted(range(len(lengths)), key=lambda i: lengths[i])):
        shares[at] = min(lengths[at], room // (len(lengths) - rank))
        room -= shares[at]
    return shares


class InlineStyle:
    """Each result between its markers, in the assistant's own message.

    Args:
        codec: the tokenizer.
        opening: before a result.
        closing: after it.
        max_length: tokens of one result, markers not counted; None: whatever fits.
    """

    def __init__(
        self, codec: TokenCodec, opening: str, closing: str, max_length: int | None = None
    ) -> None:
        self._codec, self._max_length = codec, max_length
        self._opening, self._closing = codec.encode(opening), codec.encode(closing)

    async def show(
        self, said: str, results: Sequence[str], ids: Sequence[int], room: int
    ) -> Shown | None:
        around = len(self._opening) + len(self._closing)
        left = room - around * len(results)
        if left < 0:
            return None
        inner = fit(results, self._codec, left, self._max_length)
        if any(text and not own for text, own in zip(results, inner, strict=True)):
            return None
        token_ids = [t for own in inner for t in (*self._opening, *own, *self._closing)]
        return Shown(token_ids=token_ids, text=self._codec.decode(token_ids))


def fit(
    results: Sequence[str], codec: TokenCodec, room: int, max_length: int | None
) -> list[list[int]]:
    """The tokens of several results, cut so that together they take `room` at most."""
    cap = room if max_length is None else min(room, max_length)
    inner = [cut_middle(text, codec, cap) for text in results]
    if sum(map(len, inner)) <= room:
        return inner
    shares = share_room([len(own) for own in inner], room)
    return [cut_middle(text, codec, share) for text, share in zip(results, shares, strict=True)]


Render = Callable[[str, Sequence[str], Sequence[int]], tuple[list[int], int]]
"""(what the model said, tool messages, ids so far) -> (tokens to append, tokens to drop first)."""


class ChatStyle:
    """Each result as a message, with the template's own glue.

    Args:
        codec: the tokenizer.
        render: the chat template.
        keep: told what was said and shown, once it has entered the response.
        max_length: tokens of one result; None: whatever fits.
    """

    def __init__(
        self,
        codec: TokenCodec,
        render: Render,
        keep: Callable[[str, Sequence[str]], None] = lambda said, shown: None,
        max_length: int | None = None,
    ) -> None:
        self._codec, self._render, self._keep = codec, render, keep
        self._max_length = max_length

    async def show(
        self, said: str, results: Sequence[str], ids: Sequence[int], room: int
    ) -> Shown | None:
        # Mostly all of it fits: the glue is rendered alone, which costs as much, only when it does
        # not. Text that is tokenised inside a template may take another token or two at its edges.
        glue: int | None = None
        left = room
        while left >= len(self._codec.encode_plain(CUT_MARK)):
            inner = fit(results, self._codec, left, self._max_length)
            if any(text and not own for text, own in zip(results, inner, strict=True)):
                return None
            shown = [self._codec.decode(own) for own in inner]
            token_ids, drop = self._render(said, shown, ids)
            if len(token_ids) <= room:
                self._keep(said, shown)
                return Shown(token_ids=token_ids, text=self._codec.decode(token_ids), drop=drop)
            if glue is None:
                glue = len(self._render(said, [""] * len(results), ids)[0])
                left -= glue
            else:
                left -= len(token_ids) - room
        return None
