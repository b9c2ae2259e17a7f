"""Settings of controllers, units, difficulties and curricula that cannot be kept."""

import pytest

from config.schema import ConfigError
from samplers.adaptive.profiles import RowProfile, row_ids_of, write_profile
from tests.verl_mixed.conftest import RunEnviron
from verl_mixed.checks.preflight import preflight_warnings
from verl_mixed.launch.plan import make_plan

CONTROLLED = ("mixed.controller=progress", "mixed.control.window=8")


def problems_of(environ: RunEnviron, *overrides: str) -> str:
    try:
        return "\n".join(make_plan(overrides, environ).problems())
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize(
    "overrides",
    [
        CONTROLLED,
        ("mixed.controller=worst", "mixed.control.window=8"),
        ("mixed.controller=off",),
        ("mixed.unit=trajectories",),
        ("mixed.unit=trained_tokens", "mixed.sources.math.ratio={0: 1, 9: 0.5}"),
    ],
)
def test_what_can_be_kept_is_no_problem(run_environ: RunEnviron, overrides: tuple[str, ...]):
    assert problems_of(run_environ, *overrides) == ""


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((*CONTROLLED, "mixed.apportionment=fixed"), "mixed.apportionment=fixed with mixed.contr"),
        (
            ("mixed.unit=trained_tokens", "mixed.on_change=continue"),
            "on_change=continue with mixed.u",
        ),
        ((*CONTROLLED, "mixed.sources.math=null"), "with one source there is nothing to decide"),
        ((*CONTROLLED, "mixed.sources.math.ratio={0: 1, 9: 0.5}"), "math.ratio is a schedule"),
        (
            ("mixed.controller=worst", "data.train_batch_size=1", "mixed.control.window=3"),
            "a window has 3 prompts, and 2 sources need 4",
        ),
        (
            (
                *("mixed.controller=worst", "mixed.unit=trajectories", "mixed.control.window=4"),
                "mixed.sources.math.rollout_n=20",
            ),
            "mixed.sources.math: its floor of 0.05 is",
        ),
        ((*CONTROLLED, "mixed.control.floor=0.6"), "the floors of taco, math sum to 1.2"),
        (
            (*CONTROLLED, "mixed.sources.math.ratio=0.98", "mixed.sources.taco.ratio=0.02"),
            "mixed.sources.math starts with a share of",
        ),
        (("mixed.controller=progress", "mixed.control.window=1"), "its floor of 0.05 is"),
        (
            ("mixed.on_change=continue", "+mixed.sources.math.difficulty={min: 0.1, max: 0.9}"),
            "on_change=continue with mixed.sources.math.difficulty",
        ),
        (("mixed.sources.math.on_truncated=mask",), "write +mixed.sources.math.on_truncated=mask"),
        (("mixed.controller=best",), "mixed.controller"),
        (("mixed.control.window=2",), "mixed.control.window"),
        (
            (*CONTROLLED, "trainer.total_training_steps=null", "trainer.total_epochs=2"),
            "shares that are decided on the way have no passes",
        ),
        (
            ("+mixed.sources.math.difficulty={min: 0.9, max: 0.1}",),
            "min=0.9 is above max=0.1",
        ),
        (
            ("+mixed.sources.math.difficulty={min: 0.1, max: 0.9}",),
            "source='math' has no row to draw: 0 of its",
        ),
        (
            ("+mixed.sources.math.curriculum={start: 0.8, end: 0.3, width: 0.2}",),
            "curriculum.steps",
        ),
    ],
)
def test_what_cannot_be_kept_is_named(
    run_environ: RunEnviron, overrides: tuple[str, ...], words: str
):
    assert words in problems_of(run_environ, *overrides)


def test_a_run_that_decides_nothing_is_said(run_environ: RunEnviron):
    plan = make_plan([*CONTROLLED, "trainer.total_training_steps=8"], run_environ)
    found = [str(warning) for warning in preflight_warnings(plan.config)]
    assert any("decides after each 8 steps, and the run has 8" in words for words in found)


def test_rows_without_a_profile_are_said(run_environ: RunEnviron):
    overrides = ["+mixed.sources.math.difficulty={min: 0.1, max: 0.9}"]
    [file] = [f for f in run_environ["TRAIN_FILES"].split(",") if "math" in f]
    rows = row_ids_of([file])["math"]
    write_profile(
        file,
        [
            RowProfile(row_id=row_id, trials=4, passed=passed, low=0.0, high=1.0, by="a test")
            for row_id, passed in zip(rows, (0, 1, 2, 4), strict=False)
        ],
    )
    plan = make_plan(overrides, run_environ)
    assert plan.problems() == []
    lacking = len(rows) - 4
    found = [str(warning) for warning in preflight_warnings(plan.config)]
    assert any(f"source=math: {lacking} of {len(rows)} rows have no profile" in w for w in found)
