"""Sources, pace, warnings and errors of metrics and logs, as text."""

import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_mixed.run.text import clock, passed_over_words, printable
from verl_mixed.views.progress import (
    driver_error,
    last_error,
    seconds_left,
    server_waits,
    source_in,
    sources_of,
    startup_phase,
    step_line,
    warnings_of,
)


def line(step: int, time: float, **metrics: float) -> dict[str, object]:
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    return {"step": step, "time": time, "metrics": named}


def test_sources_come_from_training_and_validation_rewards() -> None:
    lines = [line(0, 0, mixed__nq__val__reward__mean=0.1), line(1, 1, mixed__a__reward__mean=0.2)]

    assert sources_of(lines) == ["a", "nq"]


def test_the_pace_is_not_spoiled_by_a_night_between_two_starts() -> None:
    lines = [line(step, 5.0 * step + (40_000 if step > 2 else 0)) for step in range(6)]

    assert seconds_left(lines, 10) == 25.0
    assert seconds_left(lines[:1], 10) is None
    assert seconds_left(lines, None) is None


def test_times_read_as_people_write_them() -> None:
    words = [clock(8.4), clock(185), clock(3725), clock(None)]

    assert words == ["8s", "3m05s", "1h02m", "?"]


def test_a_step_line_names_rewards_counts_times_and_ratio_error() -> None:
    lines = [
        line(1, 0.0),
        line(
            2,
            4.0,
            mixed__math__reward__mean=0.5,
            mixed__math__count=8,
            mixed__math__val__reward__mean=0.6,
            timing_s__gen=1.25,
            timing_s__step=4.0,
            mixed__ratio_error__max=0,
        ),
    ]

    assert step_line(lines, 10) == (
        "step 2/10  left 32s  reward (prompts): math 0.50 (8)  validation: math 0.60  "
        "seconds: gen 1.2  ratio error 0"
    )


DRIVER = """\
(TaskRunnerV1 pid=71) Traceback (most recent call last):
(TaskRunnerV1 pid=71)   File "x.py", line 1, in run
(TaskRunnerV1 pid=71) KeyError: 'noise of a worker'
Traceback (most recent call last):
  File "main.py", line 9, in main
    ray.get(x)
\x1b[36mray.exceptions.RayTaskError(RuntimeError): ray::TaskRunnerV1.run() (pid=71)\x1b[0m
  File "trainer.py", line 3, in step
RuntimeError: 9 of 10 trajectories were lost
"""


def test_the_last_error_is_the_cause_that_the_driver_reports() -> None:
    assert last_error(DRIVER) == "RuntimeError: 9 of 10 trajectories were lost"


def test_a_workers_error_counts_when_the_driver_says_nothing() -> None:
    assert last_error("\n".join(DRIVER.splitlines()[:3])) == "KeyError: 'noise of a worker'"
    assert last_error("all is well\n") is None
    assert driver_error("\n".join(DRIVER.splitlines()[:3])) is None


@pytest.mark.parametrize("name", ["RubbleError", "TooManyFaults", "SourceStarved"])
def test_an_error_of_this_project_that_ray_carried_is_the_cause(name: str) -> None:
    log = (
        "Traceback (most recent call last):\n"
        f"ray.exceptions.RayTaskError({name}): ray::TaskRunnerV1.run() (pid=7)\n"
        f"agent_loop.training.alarms.{name}: source=nq lost 3 of 4\n"
    )

    assert driver_error(log) == f"agent_loop.training.alarms.{name}: source=nq lost 3 of 4"


def test_the_start_up_phase_is_the_last_known_word_of_the_log() -> None:
    assert startup_phase("") == "starting Ray"
    assert startup_phase("Started a local Ray instance.\n") == "Ray is up, workers are starting"


def test_what_makes_every_number_doubtful_stands_beside_each_of_them() -> None:
    bad = {
        "mixed/state_masking": 0.0,
        "mixed/drift/found": 2.0,
        "mixed/nq/reward/mean": 0.5,
        "mixed/nq/infra_error_rate": 0.25,
        "mixed/nq/loop_error_rate": 0.0,
    }
    lines = [{"step": 1, "time": 0.0, "metrics": bad}]
    warned = warnings_of(lines)

    assert [warning.split(":")[0] for warning in warned] == ["state_masking=false", "nq", "drift"]
    assert "25.0% of trajectories lost to infrastructure" in warned[1]
    assert all(warning in step_line(lines, 10) for warning in warned)
    assert warnings_of([line(1, 0, mixed__nq__reward__mean=0.5)]) == []


def test_what_calls_waited_for_servers_is_said_of_the_newest_step_or_of_all() -> None:
    lines = [
        line(1, 0, mixed__nq__infra_error_rate=0, mixed__nq__server_wait_s__sum=1200.0),
        line(2, 1, mixed__nq__infra_error_rate=0, mixed__nq__server_wait_s__sum=34.2),
    ]
    words = "calls of nq waited {} s for a tool server that was away or overloaded"

    assert server_waits(lines) == [words.format("1,234")]
    assert warnings_of(lines) == [words.format("34")]
    assert f"WARNING {words.format('34')}" in step_line(lines, 10)


@pytest.mark.parametrize("more", [{}, {"mixed__nq__server_wait_s__sum": 0.4}])
def test_a_step_without_a_wait_says_nothing_of_servers(more: dict[str, float]) -> None:
    lines = [line(1, 0, mixed__nq__infra_error_rate=0, **more)]

    assert server_waits(lines) == warnings_of(lines) == []


def test_a_source_that_lost_its_whole_validation_is_warned_of_until_the_next() -> None:
    lost = {"mixed/nq/val/count": 0.0, "mixed/nq/val/infra_error_rate": 1.0}
    lines = [
        {"step": 2, "time": 0.0, "metrics": lost},
        line(3, 1.0, mixed__nq__count=3, mixed__nq__infra_error_rate=0),
    ]
    (warning,) = warnings_of(lines)

    assert warning == "nq: validation of step 2 lost 100.0% of it to faults"
    assert sources_of(lines) == ["nq"]
    assert warning in step_line(lines, 10)
    assert warnings_of([*lines, line(4, 2.0, mixed__nq__val__infra_error_rate=0)]) == []


def test_lines_that_were_passed_over_are_counted_in_words() -> None:
    words = [passed_over_words(count) for count in (1, 2)]

    assert words == [
        "metrics.jsonl: 1 line cannot be read and was passed over",
        "metrics.jsonl: 2 lines cannot be read and were passed over",
    ]


@given(st.text())
def test_printable_text_holds_nothing_that_acts_on_a_terminal(text: str) -> None:
    shown = printable(text)

    assert len(shown) == len(text)
    assert not any(unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") for c in shown)
    assert printable(text, ascii_only=True).isascii()
    assert all(a == b for a, b in zip(shown, text, strict=True) if b.isprintable())


def test_a_source_may_have_a_slash_in_its_name() -> None:
    assert source_in("mixed/openai/gsm8k/val/reward/mean") == "openai/gsm8k"
    assert source_in("mixed/openai/gsm8k/reward/mean") == "openai/gsm8k"
    assert source_in("mixed/openai/gsm8k/reward/std") is None


def test_a_source_name_that_would_act_on_a_terminal_is_inert_in_a_step_line() -> None:
    lines = [{"step": 1, "time": 0.0, "metrics": {"mixed/a\x1b[2J\u202e\nb/reward/mean": 1.0}}]

    assert "a [2J  b 1.00" in step_line(lines, None)


def test_losses_of_the_validations_that_are_compared_are_warned_of() -> None:
    def validation(step: int, lost: float) -> dict[str, Any]:
        metrics = {"mixed/nq/val/infra_error_rate": lost}
        if lost < 1:
            metrics["mixed/nq/val/reward/mean"] = 0.5
        return {"step": step, "time": 0.0, "metrics": metrics}

    lines = [validation(i, lost) for i, lost in enumerate((1.0, 0.9, 0.5, 0.0, 1.0))]

    assert warnings_of(lines) == [
        "nq: validation of step 1 lost 90.0% of it to faults",
        "nq: validation of step 4 lost 100.0% of it to faults",
    ]
    assert warnings_of(lines[2:4]) == ["nq: validation of step 2 lost 50.0% of it to faults"]
