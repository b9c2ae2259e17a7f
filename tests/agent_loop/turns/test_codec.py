"""What others wrote is encoded as text, in tokenizers of six kinds."""

from collections.abc import Callable
from functools import lru_cache
from itertools import chain, pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)
from transformers import PreTrainedTokenizerFast

from agent_loop.turns.codec import HFCodec, codec_of

SPECIAL = ("<s>", "</s>", "<|im_end|>", "[CLS]")
OTHERS = ("<tool_call>", "</tool_call>", "<think>", "[CLS]<s>")
BLANKS = ("  ", "\n\n", "\u2581\u2581")
LETTERS = "\nabcdefghijklmnopqrstuvwxyzCLS0123<>/|_[]{}\"'\\.,"
BYTES = [f"<0x{number:02X}>" for number in range(256)]
MERGES = [("<", "s"), ("<s", ">"), ("a", "b"), ("o", "o"), ("<s>", "a"), ("\u2581", "a")]


def of_pieces(*first: str) -> dict[str, int]:
    """A vocabulary with all letters, and with the marks, as many real ones have."""
    pieces = [*first, *SPECIAL, *OTHERS, *LETTERS, *(a + b for a, b in MERGES)]
    return {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}


def byte_level(**how: Any) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [pair for pair in MERGES if "\u2581" not in pair]
    made = Tokenizer(models.BPE(vocab=of_pieces(*alphabet), merges=merges, **how))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return made


def tiktoken_like() -> Tokenizer:
    """A whole word of the vocabulary is its token, whatever the merges are."""
    made = byte_level(ignore_merges=True)
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\s+|\S+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return made


def sentencepiece(prefix: bool) -> Tokenizer:
    """As Llama 2's, which writes a blank before each stretch, and as Gemma's, which does not."""
    vocabulary = of_pieces("<unk>", "\u2581", *BYTES)
    made = Tokenizer(
        models.BPE(vocab=vocabulary, merges=MERGES, unk_token="<unk>", byte_fallback=True)
    )
    steps: list[Any] = [normalizers.Prepend("\u2581")] if prefix else []
    made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "\u2581")])
    ends = [decoders.Strip(" ", 1, 0)] if prefix else []
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *ends]
    )
    return made


def unigram() -> Tokenizer:
    """Its pieces of the marks are its best ones."""
    scores = {piece: 0.0 if len(piece) > 2 else -9.0 for piece in of_pieces("<unk>", "\u2581")}
    made = Tokenizer(models.Unigram([*scores.items()], unk_id=0))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Metaspace(prepend_scheme="first")
    return made


def words() -> Tokenizer:
    made = Tokenizer(
        models.WordPiece(
            of_pieces("<unk>", *(f"##{letter}" for letter in LETTERS)), unk_token="<unk>"
        )
    )
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.decoder = decoders.WordPiece()
    return made


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level,
    "tiktoken": tiktoken_like,
    "sentencepiece": lambda: sentencepiece(False),
    "sentencepiece with a blank": lambda: sentencepiece(True),
    "unigram": unigram,
    "words": words,
}


@lru_cache
def codec(kind: str) -> HFCodec:
    made = KINDS[kind]()
    made.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    made.add_tokens([AddedToken(text, normalized=False) for text in OTHERS])
    if kind not in ("words", "sentencepiece with a blank"):  # they write blanks themselves
        made.add_tokens([AddedToken(text, normalized=False) for text in BLANKS])
    return codec_of(PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>"))


WORDS = st.sampled_from(["a", "b", "oo", "<", ">", "|", "ab", "{}", "s>", "x", "\\", '"'])
ORDINARY = st.lists(WORDS | st.sampled_from([" ", "\n", "  ", "\n\n"]), max_size=12).map("".join)
HOSTILE = st.lists(WORDS | st.sampled_from([*SPECIAL, *OTHERS, " ", "\n\n", "  "]), max_size=8).map(
    "".join
)
EACH_KIND = pytest.mark.parametrize("kind", KINDS)
MARKS = {*SPECIAL, *OTHERS}


def marks_of(made: HFCodec, ids: list[int]) -> list[str]:
    return [text for text in map(made.decode, ([token] for token in ids)) if text.strip() in MARKS]


@EACH_KIND
@example(text="<s")
@given(text=ORDINARY.filter(lambda text: not any(mark in text for mark in MARKS)))
def test_ordinary_text_has_the_tokens_that_it_has_in_a_prompt(kind: str, text: str):
    assert codec(kind).encode_plain(text) == codec(kind).encode(text)


@EACH_KIND
@example(text="a<s>a</s><|im_end|>")
@example(text="".join(OTHERS))
@given(text=HOSTILE)
def test_the_text_of_a_mark_stays_text(kind: str, text: str):
    made = codec(kind)
    ids = made.encode_plain(text)
    assert marks_of(made, ids) == []
    if kind != "words":  # they forget where blanks were
        said = made.decode(ids)
        if kind == "unigram":  # a blank at the beginning is the one that it writes itself
            text, said = text.lstrip(" "), said.lstrip(" ")
        assert said == text


@EACH_KIND
@example(text="[CLS]<s>")  # one mark, or two
@example(text=" <think>")
@given(text=HOSTILE)
def test_a_template_s_marks_stay_and_those_of_a_text_in_it_are_text(kind: str, text: str):
    made = codec(kind)
    cuts = [0, *chain.from_iterable(made.marks(text)), len(text)]
    first, *parts = [text[at:to] for at, to in pairwise(cuts)]
    parts = [f"<s>x\n{first}", *parts]
    parts[-1] += "\n<|im_end|>x"
    ids = made.encode_parts(parts)
    assert [mark.strip() for mark in marks_of(made, ids)] == ["<s>", "<|im_end|>"]
    if kind != "words":
        blank = " " if kind == "sentencepiece with a blank" else ""
        assert made.decode(ids) == f"<s>{blank}x\n{text}\n<|im_end|>{blank}x"
    if not made.marks(text):
        assert ids == made.encode(f"<s>x\n{text}\n<|im_end|>x")
