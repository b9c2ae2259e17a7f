"""What `verl-mixed plan` says of a mixture before it runs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from config.schema import ConfigError
from tests.verl_mixed.conftest import RunEnviron, write_source
from verl_mixed.cli import main
from verl_mixed.launch.plan import make_plan
from verl_mixed.run.audit import plan_of
from verl_mixed.run.compose import save_config
from verl_mixed.views.plan.diff import compare, other_report
from verl_mixed.views.plan.report import PlanReport, ToolLoad, make_report
from verl_mixed.views.plan.text import as_json, describe, describe_diff

ROWS = {"a": 100, "b": 30, "c": 1000}


def config_of(
    sources: dict[str, Any] | None = None,
    *,
    steps: int = 10,
    batch_size: int = 10,
    tools: dict[str, Any] | None = None,
    **mixed: Any,
) -> dict[str, Any]:
    """As much of a resolved config as a plan needs."""
    sources = sources or {"a": {"ratio": 5}, "b": {"ratio": 3}, "c": {"ratio": 2}}
    return {
        "mixed": {"experiment": "trial", "run_dir": "/runs/trial", "sources": sources, **mixed},
        "data": {"train_batch_size": batch_size},
        "trainer": {"total_training_steps": steps},
        "actor_rollout_ref": {
            "rollout": {
                "n": 8,
                "multi_turn": {
                    "max_assistant_turns": 3,
                    "tool_config": {"server_url": "http://127.0.0.1:1", **(tools or {})},
                },
            }
        },
    }


def test_a_source_is_told_in_prompts_passes_and_trajectories() -> None:
    report = make_report(config_of(steps=20), ROWS, batches=2)

    own = report.sources["b"]
    assert own.ratio == {0: 0.3}
    assert own.counts == (3, 3)
    assert (own.prompts_per_step, own.trajectories_per_step) == (3, 24)
    assert (own.rows, own.steps_per_pass, own.prompts, own.passes) == (30, 10, 60, 2)


def test_the_greedy_trajectory_of_remax_is_counted() -> None:
    config = config_of(steps=20) | {"algorithm": {"adv_estimator": "remax"}}
    own = make_report(config, ROWS, batches=2).sources["b"]
    assert (own.rollout_n, own.trajectories_per_step) == (9, 27)


def test_sources_are_exhausted_in_the_order_in_which_their_rows_end() -> None:
    report = make_report(config_of(steps=20), ROWS, batches=1)

    assert report.exhausted == ("b", "a")
    ends = {name: own.exhausted_at_step for name, own in report.sources.items()}
    assert ends == {"a": 20, "b": 10, "c": None}


@given(
    sizes=st.lists(st.integers(1, 40), min_size=3, max_size=3),
    ratios=st.lists(st.floats(0.05, 1), min_size=3, max_size=3),
    batch_size=st.integers(1, 12),
    steps=st.integers(1, 12),
)
def test_the_step_that_exhausts_a_source_is_the_first_that_has_drawn_all_its_rows(
    sizes: list[int], ratios: list[float], batch_size: int, steps: int
) -> None:
    rows = dict(zip("abc", sizes, strict=True))
    sources = {name: {"ratio": ratio} for name, ratio in zip("abc", ratios, strict=True)}
    config = config_of(sources, steps=steps, batch_size=batch_size)

    report = make_report(config, rows, batches=1)

    plan = plan_of(config, rows)
    for name, own in report.sources.items():
        drawn = [plan.counts_between(0, k * batch_size)[name] for k in range(steps + 1)]
        first = next((step for step, count in enumerate(drawn) if count >= rows[name]), None)
        assert own.exhausted_at_step == first
        assert own.prompts == drawn[-1]


def test_a_schedule_shows_the_shares_at_its_knots() -> None:
    sources = {"a": {"ratio": {0: 3, 4: 1}}, "b": {"ratio": 1}}

    report = make_report(config_of(sources, steps=8), ROWS, batches=1)

    assert report.sources["a"].ratio == {0: 0.75, 4: 0.5}
    assert report.sources["b"].ratio == {0: 0.25, 4: 0.5}
    lines = [line.split() for line in describe(report)]
    assert ["ratio", "after", "4", "steps", "0.5", "0.5"] in lines


def test_a_source_with_ratio_0_is_left_out() -> None:
    report = make_report(config_of({"a": {"ratio": 1}, "b": {"ratio": 0}}), ROWS, batches=1)

    assert (list(report.sources), report.left_out) == (["a"], ("b",))
    assert "left out (ratio 0): b" in describe(report)


def load_of(report: PlanReport) -> ToolLoad:
    assert report.tools is not None
    return report.tools


def test_tool_calls_are_prompts_times_trajectories_times_turns_before_the_answer() -> None:
    sources = {
        "a": {"ratio": 0.5, "rollout_n": 4, "max_turns": 6},
        "b": {"ratio": 0.5, "max_turns": 1},
    }

    report = make_report(config_of(sources), ROWS, batches=1)

    assert report.sources["a"].tool_calls == 50 * 4 * 5
    assert report.sources["b"].tool_calls == 50 * 8 * 1
    assert load_of(report).calls == 50 * 4 * 5 + 50 * 8
    assert load_of(report).calls_per_step == 5 * 4 * 5 + 5 * 8


def test_the_step_with_most_calls_is_the_one_that_counts() -> None:
    sources = {"a": {"ratio": {0: 1, 5: 0}, "max_turns": 11}, "b": {"ratio": {0: 0, 5: 1}}}

    report = make_report(config_of(sources), ROWS, batches=10)

    per_step = [
        10 * 8 * own + 2 * 8 * other
        for own, other in zip(report.sources["a"].counts, report.sources["b"].counts, strict=True)
    ]
    assert load_of(report).calls_per_step == max(per_step)
    assert load_of(report).calls == sum(per_step)


def test_calls_past_the_burst_take_the_time_of_the_rate() -> None:
    tools = {"rate_limit_per_minute": 600, "burst": 60, "timeout": 30}

    load = load_of(make_report(config_of(tools=tools), ROWS, batches=1))

    assert load.calls_per_step == 160  # 10 prompts, 8 trajectories each, 2 calls
    assert load.added_s_per_step == pytest.approx(10)
    assert load.longest_wait_s == pytest.approx(8)  # 80 trajectories call at the same moment
    assert load.carries


def test_a_limit_that_makes_calls_wait_past_their_timeout_cannot_carry_them() -> None:
    tools = {"rate_limit_per_minute": 60, "burst": 60, "timeout": 30}

    report = make_report(config_of(tools=tools), ROWS, batches=1)

    assert not load_of(report).carries
    text = "\n".join(describe(report))
    assert "may NOT suffice: a call then waits 80.0 s at most, tool_config.timeout is 30 s" in text
    assert "raise rate_limit_per_minute" in text


def test_a_rate_that_the_interval_cannot_reach_is_said() -> None:
    tools = {"rate_limit_per_minute": 60_000, "request_interval": 0.005}

    report = make_report(config_of(tools=tools), ROWS, batches=1)

    assert load_of(report).most_per_minute == 12_000
    assert "60,000 calls a minute cannot be reached" in "\n".join(describe(report))


@pytest.mark.parametrize(
    ("tools", "added_s"),
    [
        ({"enable_global_rate_limit": False, "rate_limit_per_minute": 1}, 0),
        ({"burst": 160, "rate_limit_per_minute": 1}, 0),
        ({"request_interval": 0.1, "burst": 1000}, 15.9),
    ],
)
def test_burst_interval_and_switch_of_the_limit_count(
    tools: dict[str, Any], added_s: float
) -> None:
    load = load_of(make_report(config_of(tools=tools), ROWS, batches=1))

    assert load.added_s_per_step == pytest.approx(added_s)


def test_calls_are_said_to_be_upper_bounds_and_what_is_not_in_them() -> None:
    sources = {"a": {"ratio": 1}, "taco": {"ratio": 1}}

    text = "\n".join(describe(make_report(config_of(sources), None, batches=1)))

    assert "tool calls, upper bounds (every trajectory uses all its turns)" in text
    assert "a call per hidden test of the programs of taco" in text


def test_without_rows_all_is_told_that_needs_none() -> None:
    report = make_report(config_of(), None, batches=2, rows_unknown="not made yet")

    assert report.sources["a"].counts == (5, 5)
    assert load_of(report).calls == 10 * 160
    own = report.sources["a"]
    assert (own.rows, own.steps_per_pass, own.passes, own.exhausted_at_step) == (None,) * 4
    assert "rows, passes and repeats are unknown: not made yet" in describe(report)


def test_a_plan_is_plain_json_with_keys_that_stay() -> None:
    plain = as_json(make_report(config_of(), ROWS, batches=2))

    assert json.loads(json.dumps(plain)).keys() == {
        "batch_size",
        "steps",
        "sources",
        "left_out",
        "exhausted",
        "tools",
        "rows_unknown",
        "fingerprint",
    }
    assert plain["sources"]["a"].keys() == {
        "rows",
        "ratio",
        "counts",
        "prompts_per_step",
        "rollout_n",
        "trajectories_per_step",
        "max_turns",
        "steps_per_pass",
        "prompts",
        "passes",
        "exhausted_at_step",
        "tool_calls",
    }
    assert plain["tools"].keys() == {
        "calls",
        "calls_per_step",
        "limited",
        "per_minute",
        "burst",
        "request_interval_s",
        "added_s_per_step",
        "longest_wait_s",
        "timeout_s",
        "carries",
        "rewards_that_call",
    }


# --- two plans ------------------------------------------------------------------------------------


def test_equal_mixtures_can_resume_as_one_another() -> None:
    this = make_report(config_of(), ROWS, batches=2)
    other = make_report(config_of(steps=99), ROWS, batches=2)

    diff = compare("other", this, other)

    assert (diff.fields, diff.resumable) == ((), True)
    assert describe_diff(diff)[-1].startswith("a run of one plan can resume with the other")


def test_the_config_of_an_earlier_release_can_be_compared(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    values = config_of()
    mixed = {**values["mixed"], "infra_error_window": 5}
    path.write_text(json.dumps({**values, "mixed": mixed}))
    other = other_report(path, values, batches=2)
    assert other == make_report(values, None, batches=2, rows_unknown=other.rows_unknown)


@pytest.mark.parametrize(
    ("other", "rows", "field"),
    [
        (config_of({"a": {"ratio": 4}, "b": {"ratio": 3}, "c": {"ratio": 3}}), ROWS, "ratios"),
        (config_of(), ROWS | {"a": 101}, "sizes"),
        (config_of(batch_size=20), ROWS, "batch_size (10 -> 20)"),
        (config_of(seed=1), ROWS, "seed (0 -> 1)"),
        (config_of(apportionment="fixed"), ROWS, "apportionment (carry -> fixed)"),
    ],
)
def test_each_field_of_the_fingerprint_that_differs_is_named(
    other: dict[str, Any], rows: dict[str, int], field: str
) -> None:
    this = make_report(config_of(), ROWS, batches=2)

    diff = compare("other", this, make_report(other, rows, batches=2))

    assert not diff.resumable
    assert describe_diff(diff)[-1] == (
        f"a run of one plan cannot resume with the other, because these differ: {field}; with "
        "mixed.on_change=continue it goes on with each source's next row"
    )


@pytest.mark.parametrize("is_turned", [False, True])
def test_a_plan_that_decides_shares_differs_from_one_that_does_not(is_turned: bool) -> None:
    configs = config_of(), config_of(controller="worst")
    reports = [make_report(each, ROWS, batches=2) for each in configs]
    diff = compare("other", *(reversed(reports) if is_turned else reports))
    assert diff.fields == ("policy",)
    assert describe_diff(diff)[-1].endswith("these differ: policy; start a new run")


@pytest.mark.parametrize("is_turned", [False, True])
def test_a_plan_with_rounded_shares_is_compared_with_one_of_exact_shares(is_turned: bool) -> None:
    rounded = config_of(
        {name: {"ratio": 1 + 0.1234567890123456 * k} for k, name in enumerate("abc")}
    )
    reports = [make_report(config, ROWS, batches=2) for config in (config_of(), rounded)]
    assert [("parts" in report.fingerprint) for report in reports] == [False, True]
    this, other = reversed(reports) if is_turned else reports
    diff = compare("other", this, other)
    assert (diff.fields, diff.resumable) == (("ratios",), False)
    assert "because these differ: ratios; with" in describe_diff(diff)[-1]


def test_only_what_differs_is_listed() -> None:
    other = config_of({"a": {"ratio": 5}, "b": {"ratio": 2}, "d": {"ratio": 3}})

    diff = compare(
        "other.yaml",
        make_report(config_of(), ROWS, batches=1),
        make_report(other, ROWS | {"d": 7}, batches=1),
    )

    lines = [" ".join(line.split()) for line in describe_diff(diff)]
    assert lines[0] == "this -> other.yaml"
    assert lines[1] == "a b c d"
    assert "ratio 0.5 0.3 -> 0.2 0.2 -> - - -> 0.3" in lines
    assert "rows 100 30 1000 -> - - -> 7" in lines
    assert "batch 1 5 3 -> 2 2 -> - - -> 3" in lines
    assert as_json(diff.this, diff)["diff"]["fields"] == ["sizes", "ratios"]


def test_whether_runs_can_resume_is_open_where_rows_are_not_known() -> None:
    this = make_report(config_of(), ROWS, batches=1)
    other = make_report(config_of(), None, batches=1, rows_unknown="gone")

    diff = compare("other", this, other)

    assert diff.resumable is None
    assert "the rows of the other plan are unknown: gone" in describe_diff(diff)


def test_a_mixture_file_takes_the_place_of_the_mixture_and_brings_its_files(
    run_environ: RunEnviron, tmp_path: Path
) -> None:
    config = make_plan([], run_environ).config
    poems = write_source(tmp_path / "poems.parquet", "poems", 5)
    mixture = tmp_path / "mixture.yaml"
    sources = {"math": {"ratio": 0.5}, "poems": {"ratio": {0: 0.5, 9: 0.1}, "files": str(poems)}}
    mixture.write_text(yaml.safe_dump({"sources": sources}))

    report = other_report(mixture, config, batches=1)

    assert {name: own.rows for name, own in report.sources.items()} == {"math": 12, "poems": 5}
    assert report.sources["poems"].ratio == {0: 0.5, 9: pytest.approx(1 / 6)}


def test_the_config_of_another_run_is_compared_even_when_its_data_is_gone(
    run_environ: RunEnviron, tmp_path: Path
) -> None:
    config = make_plan([], run_environ).config
    other = make_plan(
        ["mixed.sources.math.ratio=1", "data.train_files=[/gone.parquet]"], run_environ
    )
    save_config(other.config, tmp_path / "config.yaml")

    report = other_report(tmp_path / "config.yaml", config, batches=1)

    assert report.sources["math"].ratio == {0: pytest.approx(2 / 3)}
    assert report.rows_unknown and "/gone.parquet: no such file" in report.rows_unknown


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "word"),
    [
        (None, "cannot be read"),
        ("sources: [", "cannot be read"),
        ("colour: red", "neither `sources:` nor `mixed.sources`"),
        ("sources: {math: {ratio: .nan}, taco: {ratios: 1}}", "taco.ratio: Field required"),
        ("sources: {poems: {ratio: 1}}", "source='poems' has ratio=1.0 but no rows"),
    ],
)
def test_another_file_that_is_no_plan_is_named_with_every_mistake(
    run_environ: RunEnviron, tmp_path: Path, text: str | None, word: str
) -> None:
    path = tmp_path / "other.yaml"
    if text is not None:
        path.write_text(text)

    with pytest.raises(ConfigError) as told:
        other_report(path, make_plan([], run_environ).config, batches=1)

    assert word in str(told.value)
    assert all(problem.startswith(f"{path}: ") for problem in told.value.problems)


# --- the command ----------------------------------------------------------------------------------


def command(environ: RunEnviron, *words: str) -> subprocess.CompletedProcess[str]:
    """`verl-mixed plan` in a process of its own, which says if Ray or torch came in."""
    program = (
        "import sys; from verl_mixed.cli import main; code = main(['plan', *sys.argv[1:]]); "
        "print([name for name in ('ray', 'torch', 'verl') if name in sys.modules], "
        "file=sys.stderr); sys.exit(code)"
    )
    return subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, env=environ
    )


@pytest.mark.slow
def test_a_plan_needs_neither_ray_nor_torch(run_environ: RunEnviron, tmp_path: Path) -> None:
    mixture = tmp_path / "mixture.yaml"
    mixture.write_text("sources: {math: {ratio: 1}}")

    (tmp_path / "model").mkdir()
    done = command(
        run_environ | {"MODEL_PATH": str(tmp_path / "model")},
        "--json",
        "--batches",
        "3",
        "--diff",
        str(mixture),
    )

    assert (done.returncode, done.stderr) == (0, "[]\n")
    plan = json.loads(done.stdout)
    assert plan["sources"]["math"]["counts"] == [2, 2, 2]
    assert plan["diff"]["other"]["sources"]["math"]["counts"] == [4, 4, 4]


def test_every_mistake_is_told_at_once_with_exit_2(
    run_environ: RunEnviron, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environ = run_environ | {"MATH_RATIO": "-1", "TRAIN_BATCH_SIZE": "0", "VAL_FILES": "gone"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)

    assert main(["plan"]) == 2

    told = capsys.readouterr().err
    for word in ("ratio=-1.0", "train_batch_size=0", "gone: no such file"):
        assert word in told


def test_a_demo_that_is_not_made_yet_is_planned_without_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("TRAIN_FILES", "VAL_FILES", "MODEL_PATH", "PROFILE"):
        monkeypatch.delenv(name, raising=False)

    assert main(["plan", "--batches", "1"]) == 0

    screen = capsys.readouterr().out
    assert screen.splitlines()[1].split() == ["1", "8", "6", "6"]
    assert "the demo is not made yet" in screen
