"""Text to tokens and back, as a loop needs it of a tokenizer."""

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol

from jinja2 import TemplateError


class TokenCodec(Protocol):
    """What a loop needs of a tokenizer."""

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a message; they are not part of its text."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def encode_plain(self, text: str) -> list[int]:
        """As `encode`, but the text of a control token stays text, because a tool may print it."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


class HFCodec:
    """A Hugging Face tokenizer as `TokenCodec`: no special tokens added or dropped.

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
        self._common = _copy_of(tokenizer, control_tokens=True)
        self._plain = _copy_of(tokenizer, control_tokens=False)

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


def control_texts(tokenizer: Any) -> list[str]:
    """The texts of the control tokens."""
    # `all_special_tokens` has only the tokens that have a name, as eos.
    added = tokenizer.added_tokens_decoder.values()
    return [token.content for token in added if token.special and len(token.content) > 1]


def as_plain_text(text: str, control: Sequence[str]) -> str:
    """The text with a blank in each text of a control token, which a template would tokenise as the
    token."""
    for token in control:
        text = text.replace(token, f"{token[0]} {token[1:]}")
    return text


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


def _copy_of(tokenizer: Any, *, control_tokens: bool) -> Any:
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"tokenizer={type(tokenizer).__name__} is not a fast one: agent loops need a fast one "
            "to keep a tool's text apart from control tokens; convert it to tokenizer.json"
        )
    own = copy.deepcopy(tokenizer.backend_tokenizer)
    own.no_truncation()
    own.no_padding()
    own.encode_special_tokens = not control_tokens
    return own


@cache
def codec_of(tokenizer: Any) -> HFCodec:
    return HFCodec(tokenizer)
