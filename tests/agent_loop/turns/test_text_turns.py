"""Messages of the model as actions, and answers as messages of a user."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers")

from agent_loop.turns.codec import codec_of
from agent_loop.turns.native import STEP, TEXT, NativeDialogue
from tests.fakes.real_tokenizers import real_tokenizer, tool_messages

TOKENIZER = real_tokenizer("pieces")
CODEC = codec_of(TOKENIZER)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=40)


def dialogue(**settings_of: Any) -> NativeDialogue:
    messages = tool_messages(TOKENIZER)
    return NativeDialogue(TEXT, {}, messages, CODEC, None, max_calls=1, **settings_of)


def whole(*said: str) -> str:
    """A conversation in the template: the model's messages and the user's in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(said)]
    return TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


@given(said=st.text("abc []12", min_size=1, max_size=20), answer=TEXTS, ends=st.booleans())
def test_the_response_is_what_the_template_writes(said: str, answer: str, ends: bool):
    ids = CODEC.encode(said) + ([CODEC.message_end_id] if ends and CODEC.message_end_id else [])
    ids += dialogue().glue(1).around([CODEC.encode_plain(answer)], ids[-1])
    text = whole("u") + CODEC.decode(ids)
    assert text == whole("u", said, CODEC.decode(CODEC.encode_plain(answer)))


@pytest.mark.parametrize(
    ("text", "in_reasoning", "action"),
    [
        (" [1 2] ", False, "[1 2]"),
        ("<think>or 3</think>\n[1]", False, "[1]"),
        ("or 3</think>[1]", True, "[1]"),
        ("a </think> b", False, "a </think> b"),
        ("<think>no end", False, None),
        ("no end", True, None),
        ("  ", False, None),
        ("so \\boxed{7}", False, "so \\boxed{7}"),
    ],
)
def test_the_action_is_the_message_without_its_thought(
    text: str, in_reasoning: bool, action: str | None
):
    found = dialogue(in_reasoning=in_reasoning).actions(text)
    assert [(each.kind, each.content) for each in found] == ([(STEP, action)] if action else [])
