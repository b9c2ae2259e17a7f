"""Text to tokens and back, as a loop needs it of a tokenizer.

What a tool, an environment or an agent sends is encoded as text: no token of it is one of the
tokenizer's marks, special (`<|im_end|>`) or not (`<tool_call>`), and the tokens decode to the same
text. Where a chat template renders such a text, its marks are told apart from the template's.
"""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise
from secrets import token_hex
from typing import Any, Protocol

import msgspec
from jinja2 import TemplateError
from tokenizers import Tokenizer

_BLANKS = " \t\r\n\u2581"  # the last is a blank in vocabularies of sentencepiece

_HIDDEN = token_hex(16)
"""Is put before the name of a mark, so that no text can have it."""


class TokenCodec(Protocol):
    """What a loop needs of a tokenizer."""

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a message; they are not part of its text."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def encode_plain(self, text: str) -> list[int]:
        """As `encode`, but the text of a mark stays text, because a tool may print it."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


class HFCodec:
    """A Hugging Face tokenizer as `TokenCodec`: no special tokens added or dropped.

    Marks are the added tokens, but for blanks and single characters, which are ordinary text.

    The class has its own copies of the fast tokenizer below the wrapper. A call of the wrapper with
    `split_special_tokens` changes the tokenizer that all threads share. A thread that encodes at
    the same time fails with "Already borrowed", or gets the other thread's setting. Copies take
    long to make, so `codec_of` keeps one codec for each tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.message_end_id: int | None = _message_end(tokenizer)
        """Ends an assistant's message in the chat template; eos without a template."""

        ends = {self.message_end_id, tokenizer.eos_token_id}
        self.end_ids = frozenset(end for end in ends if end is not None)
        backend, added = _backend_of(tokenizer), tokenizer.added_tokens_decoder
        self._marks = {
            token: each.content
            for token, each in added.items()
            if len(each.content.strip(_BLANKS)) > 1
        }
        self._special = {token for token in self._marks if added[token].special}
        self._common = _tokenizer_of(backend)
        self._plain = _tokenizer_of(_without(set(self._marks.values()), backend))

    def add_ends(self, token_ids: Sequence[int]) -> None:
        """Add tokens that end a message, as the engine's of the generation config."""
        self.end_ids |= frozenset(token_ids)

    def encode(self, text: str) -> list[int]:
        return self._common.encode(text, add_special_tokens=False).ids

    def encode_plain(self, text: str) -> list[int]:
        whole = text.encode(errors="replace").decode()  # JSON may have half a character
        return self._plain.encode(whole, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._common.decode(token_ids, skip_special_tokens=False)

    @property
    def mark_texts(self) -> list[str]:
        return [*self._marks.values()]

    def marks(self, text: str, *, special_only: bool = False) -> list[tuple[int, int]]:
        """Beginnings and ends of the marks that `encode` finds in a text."""
        found = self._common.encode(text, add_special_tokens=False)
        spans = list[tuple[int, int]]()
        for token, (start, end) in zip(found.ids, found.offsets, strict=True):
            if token in self._marks and (token in self._special or not special_only):
                mark = text[start:end]  # some take the blanks around them
                start += len(mark) - len(mark.lstrip())
                spans.append((start, start + len(mark.strip())))
        return spans

    def encode_parts(self, parts: Sequence[str]) -> list[int]:
        """The tokens of a text in parts, by turns others' and marks that are text: the second, the
        fourth and so on."""
        text, ends = "".join(parts), [*accumulate(map(len, parts))]
        is_plain = bytearray(len(text))
        for start, end in zip(ends[::2], ends[1::2], strict=False):
            is_plain[start:end] = b"\1" * (end - start)
        cuts = [start for start, end in self.marks(text) if not any(is_plain[start:end])]
        pieces = (text[at:to] for at, to in pairwise([0, *cuts, len(text)]))
        return self.encode_plain(_HIDDEN.join(pieces))


def _message_end(tokenizer: Any) -> int | None:
    """The control token after a message's content. In base models it is another one than eos."""
    if not getattr(tokenizer, "chat_template", None):
        return tokenizer.eos_token_id
    try:
        rendered = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": "u"}, {"role": "assistant", "content": text}],
                tokenize=True,
                return_dict=False,
            )
            for text in ("a", "b")
        ]
    except TemplateError:  # the template needs other messages
        return tokenizer.eos_token_id
    same = 0
    while same < min(map(len, rendered)) and rendered[0][-1 - same] == rendered[1][-1 - same]:
        same += 1
    added = tokenizer.added_tokens_decoder
    tail = rendered[0][len(rendered[0]) - same :]
    control = [token for token in tail if token in added and added[token].special]
    return control[0] if control else tokenizer.eos_token_id


def _backend_of(tokenizer: Any) -> bytes:
    """The fast tokenizer as JSON."""
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"tokenizer={type(tokenizer).__name__} is not a fast one: agent loops need a fast one "
            "to keep a tool's text apart from control tokens; convert it to tokenizer.json"
        )
    return tokenizer.backend_tokenizer.to_str().encode()


def _tokenizer_of(backend: bytes) -> Tokenizer:
    own = Tokenizer.from_buffer(backend)
    own.no_truncation()
    own.no_padding()
    return own


def _without(marks: set[str], backend: bytes) -> bytes:
    """The tokenizer with other names for its marks, their ids unchanged. The vocabulary may have
    them too, beside the added tokens, and may build them from pieces."""

    def named(text: str) -> str:
        return _HIDDEN + text if text in marks else text

    whole = msgspec.json.decode(backend)
    for token in whole["added_tokens"]:
        if token["content"] in marks:
            token["content"] = named(token["content"])
    model = whole["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {named(piece): token for piece, token in model["vocab"].items()}
    else:  # Unigram
        model["vocab"] = [[named(piece), score] for piece, score in model["vocab"]]
    if model.get("unk_token"):
        model["unk_token"] = named(model["unk_token"])
    if "merges" in model:
        model["merges"] = [
            [first, second]
            for first, second in model["merges"]
            if not (first in marks or second in marks or first + second in marks)
        ]
    return msgspec.json.encode(whole)


@cache
def codec_of(tokenizer: Any) -> HFCodec:
    return HFCodec(tokenizer)
