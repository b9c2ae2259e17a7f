"""A row has the same columns after it was one."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.row import Row

COLUMNS: dict[str, Any] = {
    "data_source": "nq",
    "raw_prompt": [{"role": "user", "content": "who?"}],
    "row_id": "nq:1",
    "agent_name": "search_agent",
    "__rollout_n__": 4,
    "reward_model": {"style": "rule", "ground_truth": '{"target": ["Ann"]}'},
    "extra_info": {"row_id": "nq:1", "extras": '{"level": 3}'},
    "index": 7,
    "multi_modal_data": {"images": ["cat"]},
}


@given(st.sets(st.sampled_from(sorted(COLUMNS.keys() - {"data_source"}))))
def test_columns_are_those_that_came(left_out: set[str]):
    columns = {name: value for name, value in COLUMNS.items() if name not in left_out}
    again = Row.from_columns(columns).columns()
    named = {"row_id": "nq:1"} if "extra_info" in columns or "row_id" in columns else {}
    assert again == {"raw_prompt": ()} | columns | named


def test_the_name_of_a_row_is_that_of_its_extra_info():
    row = Row.from_columns(COLUMNS | {"row_id": 17})
    assert row.row_id == row.columns()["row_id"] == "nq:1"
    assert "row_id" not in Row.from_columns({"data_source": "nq"}).columns()


def test_a_row_is_what_tools_agents_and_rewards_see():
    row = Row.from_columns(COLUMNS | {"uid": "u", "session_id": 3, "global_steps": 9})
    assert (row.source, row.agent, row.uid, row.session, row.global_steps) == (
        *("nq", "search_agent", "u", 3, 9),
    )
    assert (row.question, row.ground_truth, row.extras) == (
        "who?",
        {"target": ["Ann"]},
        {"level": 3},
    )
    seen = row.visible()
    assert seen == {
        "data_source": "nq",
        "row_id": "nq:1",
        "prompt": COLUMNS["raw_prompt"],
        "extras": {"level": 3},
    }
    seen["extras"]["level"] = 4
    seen["prompt"][0]["content"] = "else"
    assert (row.extras, row.question) == ({"level": 3}, "who?")


def test_a_row_without_a_source_is_none():
    with pytest.raises(KeyError, match="data_source"):
        Row.from_columns({"raw_prompt": []})


def test_what_is_no_json_is_an_error_where_it_is_read():
    row = Row(source="a", extra_info={"extras": "{"}, came={"reward_model": {"ground_truth": ""}})
    with pytest.raises(json.JSONDecodeError):
        _ = row.extras
    with pytest.raises(json.JSONDecodeError):
        _ = row.ground_truth
