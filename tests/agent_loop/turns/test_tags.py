"""Where a turn is cut and what it asks for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.turns.tags import (
    Action,
    ActionKind,
    Tags,
    cut_at_end,
    stop_token_ids,
)
from config.schema import ToolConfig
from tests.fakes.engine import CharTokenizer

CONFIG = ToolConfig(server_url="http://127.0.0.1:1")
TAGS = Tags.from_config(CONFIG, (ActionKind.CODE, ActionKind.SEARCH, ActionKind.ANSWER))
TEXT = st.lists(
    st.sampled_from(["<code>", "</code>", "<answer>", "</answer>", "a", "<", "</", ">", " "]),
    max_size=12,
).map("".join)


@given(text=TEXT, wide=st.lists(st.sampled_from(["</", "e>", "r>a", "</code>"]), unique=True))
def test_the_cut_keeps_the_fewest_tokens_that_hold_a_closing_tag(text, wide):
    codec = CharTokenizer(wide)
    ids = codec.encode(text)
    keep = cut_at_end(ids, text, TAGS, codec.decode)
    complete = [n for n in range(len(ids) + 1) if TAGS.find_end(codec.decode(ids[:n])) >= 0]
    assert keep == (min(complete) if complete else None)


@given(kind=st.sampled_from(["code", "search", "answer"]), content=st.text("abc \n=1", max_size=20))
def test_parsing_undoes_rendering(kind, content):
    start, end = TAGS.pairs[kind]
    assert TAGS.actions(f"so: {start}{content}{end}") == [
        Action(kind=kind, content=content.strip())
    ]


@pytest.mark.parametrize("text", ["</answer>", "<code>1</answer>"])
def test_a_closing_tag_without_its_opening_is_a_malformed_action(text):
    assert [action.kind for action in TAGS.actions(text)] == [ActionKind.MALFORMED]


def test_a_text_without_a_closing_tag_asks_for_nothing():
    assert TAGS.actions("<code>1+1") == []


def test_a_loop_reads_only_the_tags_it_allows():
    math_only = Tags.from_config(CONFIG, (ActionKind.CODE, ActionKind.ANSWER))
    assert math_only.actions("<search>x</search>") == []


def test_only_closing_tags_of_one_token_become_stop_tokens():
    codec = CharTokenizer(wide=["</code>"])
    assert stop_token_ids(TAGS.stop_texts, codec.encode) == [codec.wide["</code>"]]


@given(
    asked=st.lists(st.sampled_from("abc"), max_size=5), most=st.integers(1, 4), done=st.booleans()
)
def test_a_turn_may_ask_for_several_things_and_an_answer_ends_it(asked, most, done):
    tags = Tags.from_config(CONFIG, list(TAGS.pairs), max_actions=most)
    text = "".join(f"<search>{word}</search>" for word in asked) + "<answer>z</answer>" * done
    wanted = ([("search", word) for word in asked] + [("answer", "z")] * done)[:most]
    found = tags.actions(text + " and so on")
    assert [(action.kind, action.content) for action in found] == wanted
    end = tags.find_end(text + " and so on")
    assert tags.actions(text[: max(end, 0)]) == found


def test_where_a_turn_may_ask_for_several_things_the_engine_stops_at_an_answer_only():
    assert Tags.from_config(CONFIG, list(TAGS.pairs), max_actions=2).stop_texts == ["</answer>"]


def test_a_box_answers_where_no_tag_does():
    tags = Tags.from_config(CONFIG, (ActionKind.CODE, ActionKind.ANSWER), answer_boxed=True)
    assert tags.actions(r"it is \boxed{7}") == [Action(kind=ActionKind.ANSWER, content="7")]
    assert tags.actions(r"<code>\boxed{7}</code>")[0].kind == ActionKind.CODE
