"""Settings that are gone are refused with the reason; runs that were begun with them go on."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from config.lookup import flatten
from config.removed import REMAINS, REMOVED, other_rules, why_removed, without_removed
from config.schema import ConfigError, MixedConfig, load_section
from verl_mixed.launch.plan import make_plan
from verl_mixed.run.compose import load_config, without_profile
from verl_mixed.run.sections import shipped_loops


@pytest.fixture(autouse=True)
def _gone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(REMOVED, "mixed.old_key", "nothing read it; leave it out")
    monkeypatch.setitem(REMOVED, "mixed.sources.*.old_key", "nothing read it; leave it out")


def test_what_is_gone_is_not_in_the_shipped_config():
    loops = [f"agent_loops.name.{key}" for entry in shipped_loops() for key in entry]
    assert [key for key in (*flatten(without_profile("dp")), *loops) if why_removed(key)] == []


def test_each_reason_has_a_remedy():
    assert [why for why in REMOVED.values() if "; " not in why or why.endswith(".")] == []


@pytest.mark.parametrize("key", ["mixed.old_key", "mixed.sources.nq.old_key"])
def test_an_override_is_refused_with_the_reason(key: str):
    for override in (f"{key}=1", f"+{key}=1"):
        try:
            problems = make_plan([override], {}).problems(data=False, machine=False)
        except ConfigError as error:
            problems = error.problems
        (problem,) = [each for each in problems if key in each]
        assert "nothing read it; leave it out" in problem


def test_a_section_is_refused_with_the_reason():
    with pytest.raises(
        ConfigError,
        match="old_key: this release has no such key: nothing read it; leave it out",
    ):
        load_section(MixedConfig, {"old_key": 1}, "mixed")


def test_a_run_of_an_earlier_release_is_read_without_them(tmp_path: Path):
    saved = tmp_path / "config.yaml"
    saved.write_text("mixed: {seed: 1, old_key: 2, sources: {nq: {old_key: 3, ratio: 1}}}\n")
    assert load_config(saved) == {"mixed": {"seed": 1, "sources": {"nq": {"ratio": 1}}}}


def test_a_setting_of_the_tool_server_is_refused_with_the_reason():
    problems = make_plan(["mixed.tool_server={drain_s: 5}"], {}).problems(data=False, machine=False)
    (problem,) = [each for each in problems if "drain_s" in each]
    assert problem.endswith("after SIGTERM requests have 10 s to end; leave it out")


@pytest.mark.parametrize(
    ("reward", "kept"),
    [("judge", {"score": {}}), ("own.py:f", {"price": 3, "score": {"pattern": 1}})],
)
def test_an_option_of_a_judge_is_none_of_a_function_of_the_user_s(reward: str, kept: object):
    options = {"price": 3, "score": {"pattern": 1}}
    source = {"reward": reward, "reward_options": options}
    assert without_removed({"mixed": {"sources": {"nq": source}}}) == {
        "mixed": {"sources": {"nq": source | {"reward_options": kept}}}
    }


JUDGED = {"reward": "judge", "reward_options": {"aggregate": "mean", "price": {"input": 1}}}


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("mixed.control.speed", 2.0),
        ("mixed.sources.nq.floor", 0.1),
        ("algorithm.state_masked_grpo.norm_by_std", False),
        ("mixed.sources.nq.reward_options.aggregate", "median"),
        ("mixed.sources.nq.reward_options.score", {"pattern": "(.)"}),
    ],
)
def test_a_run_that_learned_by_another_value_is_not_resumed(place: str, value: object):
    saved: dict[str, Any] = {
        "algorithm": {"norm_adv_by_std_in_grpo": True, "state_masked_grpo": {"norm_by_std": True}},
        "mixed": {"control": {"speed": 4.0}, "sources": {"nq": JUDGED | {"floor": None}}},
    }
    assert other_rules(saved) == []
    section = saved = deepcopy(saved)
    *parents, name = place.split(".")
    for each in parents:
        section = section[each]
    section[name] = value
    (rule,) = other_rules(saved)
    assert rule.startswith(place) and "this release has no such key" in rule


def test_a_run_whose_tasks_were_those_of_verifiers_is_read_and_not_resumed():
    environment = {"use": "verifiers", "options": {"id": "wordle"}}
    for saved in (environment, "verifiers"):
        config = {"mixed": {"sources": {"games": {"ratio": 1, "environment": saved}}}}
        assert without_removed(config) == {"mixed": {"sources": {"games": {"ratio": 1}}}}
        (rule,) = other_rules(config)
        assert rule.startswith("mixed.sources.games.environment.use='verifiers': ")
        assert "docs/examples/verifiers_agent.py" in rule


def test_what_remains_of_a_key_that_is_gone_has_its_reason():
    assert REMAINS.keys() <= REMOVED.keys()
