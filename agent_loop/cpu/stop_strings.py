"""Stop strings over token ids: which token completes one, without decoding everything again."""

from collections.abc import Callable, Sequence

BROKEN = "\ufffd"
"""What bytes decode to that are no whole character."""


class StopStrings:
    """Sees which token completes a stop string, without decoding all that came before it.

    Says what decoding the whole output after every token would, as long as a token's bytes are the
    same in any company. So they are in byte-level BPE; at most the first token of what is decoded
    may look otherwise, as where a tokenizer drops a leading space.

    Args:
        decode: text of token ids, special ones included.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._own: dict[int, str] = {}

    def completed(self, token_ids: Sequence[int], stop: Sequence[str]) -> bool:
        """Whether the newest token completes a stop string; those before it completed none."""
        newest = self._text(token_ids[-1])
        if not any(_may_end(newest, text[-1]) for text in stop):
            return False
        # Every token with a text holds a byte of it at least; one more, for it may look otherwise.
        needed = 1 + max(len(text.encode(errors="surrogatepass")) for text in stop)
        start = len(token_ids)
        while start and needed:
            start -= 1
            needed -= bool(self._text(token_ids[start]))
        tail = self._decode(token_ids[start:])
        return any(text in tail for text in stop)

    def _text(self, token_id: int) -> str:
        """What a token looks like: twice, as a first one and as a later one."""
        if token_id not in self._own:
            self._own[token_id] = self._decode([token_id, token_id])
        return self._own[token_id]


def _may_end(token_text: str, character: str) -> bool:
    """Whether a token may hold the last byte of a character."""
    return character in token_text or (not character.isascii() and BROKEN in token_text)
