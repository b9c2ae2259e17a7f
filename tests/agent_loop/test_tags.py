"""Where a turn is cut and what it asks for."""

from hypothesis import given
from hypothesis import strategies as st

from agent_loop.tags import (
    Action,
    ActionKind,
    Tags,
    cut_at_end_tag,
    find_end,
    parse_action,
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
    keep = cut_at_end_tag(ids, TAGS, codec.decode)
    complete = [n for n in range(len(ids) + 1) if find_end(codec.decode(ids[:n]), TAGS) >= 0]
    assert keep == (min(complete) if complete else len(ids))


@given(kind=st.sampled_from(list(ActionKind)), content=st.text("abc \n=1", max_size=20))
def test_parsing_undoes_rendering(kind, content):
    start, end = TAGS.pairs[kind]
    assert parse_action(f"so: {start}{content}{end}", TAGS) == Action(
        kind=kind, content=content.strip()
    )


def test_a_closing_tag_without_its_opening_is_no_action():
    assert parse_action("</answer>", TAGS) is None
    assert parse_action("<code>1</answer>", TAGS) is None


def test_a_loop_reads_only_the_tags_it_allows():
    math_only = Tags.from_config(CONFIG, (ActionKind.CODE, ActionKind.ANSWER))
    assert parse_action("<search>x</search>", math_only) is None


def test_only_closing_tags_of_one_token_become_stop_tokens():
    codec = CharTokenizer(wide=["</code>"])
    assert stop_token_ids(TAGS, codec.encode) == [codec.wide["</code>"]]
