"""Entries of `mixed.sources.<name>.tools`: what is read, and what is refused by name."""

import os
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from config.schema import ConfigError, MixedConfig, load_section
from config.tool_entries import OWN_TOOLS, ToolEntry, as_entry, per_minute, with_absolute_path

FUNCTION = "tools/orders.py:look_up"
STDIO, HTTP, VERL = "python -m server", "https://host/mcp", "config/tools.yaml"
SECRET = "HTTPS://me:pw@host/mcp?key=pw"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "an entry has one of tool, mcp, verl, not none"),
        ({"tool": "search", "mcp": STDIO}, "not tool and mcp"),
        ({"tool": "look_up"}, "tool='look_up' is none of run_code, search, calculate"),
        ({"tool": "orders.txt:look_up"}, "no path/to/file.py:name"),
        ({"tool": "search", "only": ["search"]}, "only: not read for tool='search'"),
        ({"tool": FUNCTION, "only": ["look_up"]}, "only: not read for tool="),
        ({"tool": "search", "where": "process"}, "where: not read for tool='search'"),
        ({"mcp": STDIO, "where": "loop"}, "where: not read for mcp="),
        ({"verl": VERL, "where": "sandbox"}, "where: not read for verl="),
        ({"tool": FUNCTION, "per": "worker"}, "per: not read for tool="),
        ({"mcp": HTTP, "per": "trajectory"}, "per: not read for mcp="),
        ({"mcp": HTTP, "env": ["KEY"]}, "env: not read for mcp="),
        ({"mcp": SECRET, "env": ["KEY"]}, "env: not read for mcp='https://host/mcp'; leave"),
        ({"tool": SECRET}, "tool='https://host/mcp' is none of"),
        ({"verl": VERL, "env": ["KEY"]}, "env: not read for verl="),
        ({"mcp": HTTP, "cwd": "/x"}, "cwd: not read for mcp="),
        ({"verl": VERL, "cwd": "/x"}, "cwd: not read for verl="),
        ({"mcp": STDIO, "token": "KEY"}, "token: not read for mcp="),
        ({"tool": FUNCTION, "token": "KEY"}, "token: not read for tool="),
        ({"mcp": STDIO, "per": "trajectory", "cache": True}, "cache: not read for mcp="),
        ({"tool": "search", "rate": "2"}, "write a number above 0 and a unit"),
        ({"tool": "search", "rate": "0/s"}, "write a number above 0 and a unit"),
        ({"tool": "search", "rate": "-1/s"}, "write a number above 0 and a unit"),
        ({"tool": "search", "rate": "2/day"}, "write a number above 0 and a unit"),
        ({"tool": "search", "rate": "0.0001/h"}, "write a number above 0 and a unit"),
        ({"tool": "search", "rate": "1000000000/s"}, "write a number above 0 and a unit"),
        ({"mcp": STDIO, "only": ["a", "b", "a"]}, "names a tool twice"),
        ({"tool": "search", "slots": 0}, "slots"),
        ({"tool": "search", "timeout": 0}, "timeout"),
        ({"tool": "search", "timeout": float("inf")}, "timeout"),
        ({"tool": "search", "retry": -1}, "retry"),
        ({"tool": "search", "rates": "2/s"}, "rates"),
    ],
)
def test_what_an_entry_would_not_read_is_refused_by_name(given: dict[str, Any], words: str):
    with pytest.raises(ValidationError, match=re.escape(words)):
        ToolEntry.model_validate(given)


@pytest.mark.parametrize(
    "given",
    [
        *({"tool": name, "rate": "2/s", "slots": 1, "cache": True} for name in OWN_TOOLS),
        {"tool": FUNCTION, "where": "sandbox", "timeout": 1.0, "retry": 0, "cache": True},
        {"mcp": STDIO, "only": ["a"], "per": "trajectory", "env": ["KEY"]},
        {"mcp": STDIO, "per": "worker", "cache": True},
        {"mcp": HTTP, "only": ["a"], "token": "KEY", "cache": True},
        {"verl": VERL, "only": ["a"], "rate": "30/min"},
    ],
)
def test_what_belongs_together_is_read(given: dict[str, Any]):
    entry = ToolEntry.model_validate(given)
    assert entry.model_dump(exclude_unset=True) == given
    assert entry.target in given.values()


def test_a_text_is_short_for_a_tool_and_a_function_has_a_file_and_a_name():
    sources = {"shop": {"ratio": 1, "tools": ["search", FUNCTION, {"mcp": STDIO}]}}
    values = {"experiment": "x", "run_dir": "/x", "sources": sources}
    entries = load_section(MixedConfig, values, "mixed").sources["shop"].tools
    assert entries is not None
    search, function, server = entries
    assert (search.tool, search.python_name) == ("search", None)
    assert function.python_name == ("tools/orders.py", "look_up")
    assert (server.target, server.python_name) == (STDIO, None)
    assert [as_entry(each) for each in ("a", {"mcp": "b"}, 3)] == [{"tool": "a"}, {"mcp": "b"}, 3]


@given(
    calls=st.decimals(min_value="0.001", max_value=10**6, places=3).map(lambda d: f"{d:f}"),
    unit=st.sampled_from([("s", 1), ("min", 60), ("h", 3600)]),
    space=st.sampled_from(["", " "]),
)
def test_a_rate_is_so_many_calls_in_so_many_seconds(calls, unit, space):
    name, seconds = unit
    rate = f"{space}{calls}{space}/{space}{name}"
    assert per_minute(rate) == pytest.approx(float(calls) / seconds * 60)
    assert ToolEntry(tool="search", rate=rate).rate == rate


@given(st.text("0123456789./sminh -+e", max_size=8))
def test_a_text_is_a_rate_above_0_or_none(text):
    found = per_minute(text)
    assert found is None or found > 0
    is_written = re.fullmatch(r"\d+(\.\d+)? */ *(s|min|h)", text.strip(" "))
    assert found is None or is_written
    if is_written and text.strip(" ")[0] in "123456789":
        assert found is not None


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ("search", "search"),
        (FUNCTION, f"{{}}/{FUNCTION}"),
        ("/x/a.py:b", "/x/a.py:b"),
        ("~/a.py:b", f"{os.path.expanduser('~')}/a.py:b"),
        ({"tool": FUNCTION, "slots": 2}, {"tool": f"{{}}/{FUNCTION}", "slots": 2}),
        ({"verl": VERL}, {"verl": f"{{}}/{VERL}"}),
        ({"mcp": "python server.py:x"}, {"mcp": "python server.py:x", "cwd": "{}"}),
        ({"mcp": STDIO, "cwd": "sub"}, {"mcp": STDIO, "cwd": "{}/sub"}),
        ({"mcp": HTTP}, {"mcp": HTTP}),
        ({"mcp": SECRET}, {"mcp": SECRET}),
        (3, 3),
        ({"tool": 3}, {"tool": 3}),
    ],
)
def test_files_get_absolute_paths_and_what_is_no_file_stays(given, made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def filled(value: Any) -> Any:
        return value.format(tmp_path) if isinstance(value, str) else value

    expected = {k: filled(v) for k, v in made.items()} if isinstance(made, dict) else filled(made)
    assert with_absolute_path(given) == expected


@pytest.mark.parametrize(
    ("first", "second", "is_refused"),
    [
        ({"tool": "search", "rate": "2/s"}, {"tool": "search", "rate": "3/s"}, True),
        ({"tool": "search", "rate": "2/s"}, "search", True),
        ({"mcp": STDIO, "slots": 2}, {"mcp": STDIO, "slots": 3}, True),
        ({"mcp": SECRET, "slots": 2}, {"mcp": SECRET, "slots": 3}, True),
        ({"tool": "search", "rate": "2/s"}, {"tool": "run_code", "rate": "3/s"}, False),
        ({"tool": "search", "rate": "2/s"}, {"tool": "search", "rate": "2/s", "retry": 1}, False),
    ],
)
def test_two_sources_that_name_one_tool_name_the_same_limits(first, second, is_refused):
    sources = {"a": {"ratio": 1, "tools": [first]}, "b": {"ratio": 1, "tools": [second]}}
    values = {"experiment": "x", "run_dir": "/x", "sources": sources}
    if not is_refused:
        assert load_section(MixedConfig, values, "mixed").sources["b"].tools
        return
    with pytest.raises(ConfigError, match=r"sources\.b\.tools: .* in sources\.a\.tools") as caught:
        load_section(MixedConfig, values, "mixed")
    assert "pw" not in str(caught.value)
