"""The code of a model's answer: the rule as one regular expression, and in time that is linear."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tool_server.wire.fenced import _blocks, extract_code

RULE = re.compile(r"```[ \t]*([\w+#-]*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
"""Quadratic: for short texts only."""

PARTS = st.sampled_from(["```", "`", "\n", "python", "C++", " ", "\t", "x = 1", "é"])


@example(parts=["```", "````", "\n", "`", "```"])
@given(parts=st.lists(PARTS, max_size=30))
def test_blocks_are_those_of_the_rule(parts: list[str]):
    text = "".join(parts)
    expected = [(name.lower(), code) for name, code in RULE.findall(text)]
    assert list(_blocks(text)) == expected


@pytest.mark.parametrize("part", ["```", "``` ", " ", "a", "```\n"])
def test_a_long_answer_takes_no_long_time(part: str):
    text = f"```{part * 1_000_000}"  # the rule takes minutes, the test's time limit ends it
    assert isinstance(extract_code(text, "python"), str)
