"""The text of each token of a response, by the run's tokenizer.

A byte-level tokenizer may need several tokens for one character. The token that completes the
character shows it and the tokens before it show nothing, so all texts together are the response.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from tokenizers import Tokenizer

from config.lookup import at

BROKEN = "\ufffd"
"""The character that a decoder returns for an incomplete character."""

CHARACTER = 4
"""Bytes of the longest UTF-8 character, so the most tokens that one character needs."""

Decode = Callable[[Sequence[int]], str]

_MODEL = "actor_rollout_ref.model"


def token_texts(ids: Sequence[int], decode: Decode) -> list[str]:
    """The text of each of the T tokens of a response.

    Together the texts are `decode(ids)`, for decoders that work part by part. The text of a token
    whose character a later token completes is empty.
    """
    texts: list[str] = []
    alone: dict[int, str] = {}
    waiting: list[int] = []
    # A decoder may treat the first token differently (it drops a leading blank), so each token is
    # decoded behind the first one.
    before = list(ids[:1])
    lead = decode(before)
    if BROKEN in lead or not lead:
        before, lead = [], ""

    def after(part: Sequence[int]) -> str:
        whole = decode([*before, *part])
        return whole[len(lead) :] if whole.startswith(lead) else decode(part)

    for position, token in enumerate(ids):
        if not waiting:
            if position == 0:
                text = decode([token])
            elif token in alone:
                text = alone[token]
            else:
                text = alone[token] = after([token])
            if BROKEN not in text:
                texts.append(text)
                continue
        waiting.append(token)
        texts.append("")
        is_whole = not after(waiting).endswith(BROKEN)
        # an unfinished end may still be completed by the next token
        rest = 1 if is_whole or position == len(ids) - 1 else CHARACTER
        while len(waiting) >= rest and (length := _first_whole(waiting, after)):
            texts[-len(waiting) + length - 1] = after(waiting[:length])
            del waiting[:length]
        if waiting and rest == 1:
            texts[-1] = after(waiting)
            waiting.clear()
    return texts


def _first_whole(waiting: Sequence[int], after: Callable[[Sequence[int]], str]) -> int:
    """Fewest tokens at the beginning that decode without the others; 0: no such number."""
    whole = after(waiting)
    for length in range(1, min(len(waiting), 2 * CHARACTER)):
        if after(waiting[:length]) + after(waiting[length:]) == whole:
            return length
    return 0


def tokenizer_of(config: Mapping[str, Any]) -> tuple[Decode | None, str]:
    """The run's tokenizer, read from the disk; nothing is downloaded.

    Returns:
        (function that decodes ids with special tokens, ""), or (None, why there is none).
    """
    name = at(config, f"{_MODEL}.tokenizer_path") or at(config, f"{_MODEL}.path")
    if not name:
        return None, f"no {_MODEL}.path in config.yaml: token ids are shown"
    path = _file_of(str(name))
    if path is None:
        return None, f"no tokenizer.json of {_MODEL}.path={name} on this machine: ids are shown"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exception
        return None, f"cannot read {path}: {error}; token ids are shown"
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False), ""


def _file_of(name: str) -> Path | None:
    local = Path(name).expanduser() / "tokenizer.json"
    if local.is_file():
        return local
    try:
        cached = try_to_load_from_cache(name, "tokenizer.json")
    except HFValidationError:  # `name` is a path that does not exist
        return None
    return Path(cached) if isinstance(cached, str) else None
