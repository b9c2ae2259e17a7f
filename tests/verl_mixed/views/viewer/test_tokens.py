"""The texts of single tokens, and their concatenation."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from tests.fakes.real_tokenizers import KINDS, real_tokenizer
from verl_mixed.views.viewer.tokens import token_texts, tokenizer_of


def decoder_of(kind: str) -> tuple[Tokenizer, int]:
    backend = real_tokenizer(kind).backend_tokenizer
    return backend, backend.get_vocab_size()


@given(kind=st.sampled_from(KINDS), data=st.data())
def test_texts_of_any_ids_make_up_the_decoded_response(kind: str, data: st.DataObject):
    backend, size = decoder_of(kind)
    text = data.draw(st.text(max_size=12))
    random = data.draw(st.lists(st.integers(0, size - 1), max_size=20))
    ids = backend.encode(text).ids + random

    def decode(part: Sequence[int]) -> str:
        return backend.decode(list(part), skip_special_tokens=False)

    texts = token_texts(ids, decode)
    assert len(texts) == len(ids)
    assert "".join(texts) == decode(ids)


def test_a_character_of_several_tokens_is_shown_on_its_last():
    backend, _ = decoder_of("pieces")
    ids = backend.encode("a😀é<code>").ids
    texts = token_texts(ids, lambda part: backend.decode(list(part), skip_special_tokens=False))
    assert texts == ["a", "", "", "", "😀", "", "é", "<", "code", ">"]


def test_a_character_that_is_never_completed_stands_on_its_own_token():
    backend, _ = decoder_of("pieces")
    first, second, third, last = backend.encode("😀").ids
    ids = [first, *backend.encode("a").ids, second, first, second, third, last, first]
    texts = token_texts(ids, lambda part: backend.decode(list(part), skip_special_tokens=False))
    assert texts == ["\ufffd", "a", "\ufffd", "", "", "", "😀", "\ufffd"]


def test_broken_characters_cost_no_more_each_when_there_are_many():
    backend, _ = decoder_of("pieces")
    broken = backend.encode("😀").ids[:1] * 3000
    longest = 0

    def decode(part: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(part))
        return backend.decode(list(part), skip_special_tokens=False)

    texts = token_texts(broken, decode)
    assert texts == ["\ufffd"] * 3000
    assert longest <= 8


def test_a_blank_that_begins_a_word_is_kept_where_decoders_drop_the_first():
    pieces = {"▁the": 0, "▁sea": 1, "s": 2}
    tokenizer = Tokenizer(models.BPE(vocab=pieces, merges=[]))
    tokenizer.decoder = decoders.Metaspace()
    texts = token_texts([1, 2, 0, 1], lambda part: tokenizer.decode(list(part)))
    assert texts == ["sea", "s", " the", " sea"]


def test_tokenizer_is_read_from_the_models_folder(tmp_path: Path):
    real_tokenizer("pieces").save_pretrained(tmp_path / "here")
    for model in (
        {"path": str(tmp_path / "here")},
        {"path": str(tmp_path / "gone"), "tokenizer_path": str(tmp_path / "here")},
    ):
        decode, note = tokenizer_of({"actor_rollout_ref": {"model": model}})
        assert decode is not None and note == ""
        ids = real_tokenizer("pieces").encode("<|im_end|>é")
        assert decode(ids) == "<|im_end|>é"


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ({}, "no actor_rollout_ref.model.path in config.yaml"),
        ({"path": "/nowhere/at/all"}, "no tokenizer.json of .*=/nowhere/at/all on this machine"),
        ({"path": "someone/not-downloaded"}, "no tokenizer.json of .*=someone/not-downloaded"),
    ],
)
def test_a_tokenizer_that_is_gone_is_said(model: dict[str, str], says: str):
    decode, note = tokenizer_of({"actor_rollout_ref": {"model": model}})
    assert decode is None
    assert re.match(says, note)


def test_a_damaged_tokenizer_is_said(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text("{")
    decode, note = tokenizer_of({"actor_rollout_ref": {"model": {"path": str(tmp_path)}}})
    assert decode is None
    assert note.startswith(f"cannot read {tmp_path}/tokenizer.json: ")
