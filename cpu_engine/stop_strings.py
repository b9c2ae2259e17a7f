"""Finds the token that completes a stop string, without decoding the whole output each time."""

from collections.abc import Callable, Sequence

BROKEN = "\ufffd"
"""Bytes that are not a whole character decode to this."""


class StopStrings:
    """Finds the token that completes a stop string from the last few tokens.

    The result is that of decoding the whole output after every token, if the bytes of a token do
    not depend on the tokens beside it. Byte-level BPE is so. Only the first token that is decoded
    may have another text, as when a tokenizer drops a leading space. `decode` must keep
    special tokens.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._own: dict[int, str] = {}

    def completed(self, token_ids: Sequence[int], stop: Sequence[str]) -> bool:
        """Whether the newest token completes a stop string. No earlier token may have done so."""
        newest = self._text(token_ids[-1])
        if not any(_may_end(newest, text[-1]) for text in stop):
            return False
        # Each token with a text has at least one byte. One token more, because the text of the
        # first may differ.
        needed = 1 + max(len(text.encode(errors="surrogatepass")) for text in stop)
        start = len(token_ids)
        while start and needed:
            start -= 1
            needed -= bool(self._text(token_ids[start]))
        tail = self._decode(token_ids[start:])
        return any(text in tail for text in stop)

    def _text(self, token_id: int) -> str:
        """Text of a token, twice: as the first token and as a later one."""
        if token_id not in self._own:
            self._own[token_id] = self._decode([token_id, token_id])
        return self._own[token_id]


def _may_end(token_text: str, character: str) -> bool:
    """Whether a token may contain the last byte of a character."""
    return character in token_text or (not character.isascii() and BROKEN in token_text)
