"""Messages of the model as actions, and answers as messages of a user."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers")

from agent_loop.turns.codec import HFCodec, codec_of
from agent_loop.turns.text_turns import STEP, TextDialogue, without_thoughts
from agent_loop.turns.tool_messages import ToolMessages
from tests.fakes.real_tokenizers import real_tokenizer

TOKENIZER = real_tokenizer("pieces")
TEXTS = st.text(st.characters(codec="utf-8"), max_size=40)


def dialogue(**settings_of: Any) -> tuple[TextDialogue, HFCodec]:
    def render(messages: Any, add_generation_prompt: bool) -> str:
        return TOKENIZER.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt
        )

    codec = codec_of(TOKENIZER)
    messages = ToolMessages(render, codec.encode, codec.end_ids)
    return TextDialogue(messages, codec, **settings_of), codec


def whole(*said: str) -> str:
    """A conversation in the template: the model's messages and the user's in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(said)]
    return TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


@given(said=st.text("abc []12", min_size=1, max_size=20), answer=TEXTS, ends=st.booleans())
def test_the_response_is_what_the_template_writes(said: str, answer: str, ends: bool):
    style, codec = dialogue()
    ids = codec.encode(said) + ([codec.message_end_id] if ends and codec.message_end_id else [])
    shown = asyncio.run(style.show(said, [answer], ids, 500))
    assert shown is not None and shown.drop == 0
    text = whole("u") + codec.decode([*ids, *shown.token_ids])
    assert text == whole("u", said, codec.decode(codec.encode_plain(answer)))


@given(answer=st.text("ab \n", max_size=300), room=st.integers(0, 60), longest=st.integers(1, 80))
def test_an_answer_never_takes_more_than_its_room(answer: str, room: int, longest: int):
    style, codec = dialogue(max_length=longest)
    shown = asyncio.run(style.show("x", [answer], codec.encode("x"), room))
    if shown is not None:
        assert len(shown.token_ids) <= room
        assert shown.text == codec.decode(shown.token_ids)


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
    ],
)
def test_the_action_is_the_message_without_its_thought(
    text: str, in_reasoning: bool, action: str | None
):
    style, _ = dialogue(in_reasoning=in_reasoning)
    found = style.actions(text)
    assert [(each.kind, each.content) for each in found] == ([(STEP, action)] if action else [])
    assert without_thoughts(text, in_reasoning=in_reasoning) == (action or "")
