"""PROFILE=smollm: what the launcher fills in, and what a run is said to have cost."""

from pathlib import Path

import pytest

from config.lookup import at, files_at
from samplers.rows.sources.demo import DEMO_SOURCES
from verl_mixed.demo.pretrained import SMOLLM_FOLDER
from verl_mixed.launch.plan import make_plan
from verl_mixed.launch.summary import cost_line
from verl_mixed.prepare.generated_rows import rows_folder

MODEL = "actor_rollout_ref.model.path"
SMOLLM = {"PROFILE": "smollm"}


@pytest.fixture(autouse=True)
def _at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_profile_takes_the_pretrained_model_and_generated_rows():
    plan = make_plan(["mixed.seed=3"], SMOLLM)
    rows = rows_folder(3).absolute()
    assert plan.generated == rows
    assert at(plan.config, MODEL) == str(SMOLLM_FOLDER.absolute())
    wanted = [str(rows / f"{source}_train.parquet") for source in DEMO_SOURCES]
    assert files_at(plan.config, "data.train_files") == wanted
    assert at(plan.config, "trainer.experiment_name").startswith("smollm2-135m-instruct-")
    assert plan.problems(data=False) == []


def test_files_of_ones_own_are_trained_with_the_pretrained_model():
    plan = make_plan([], SMOLLM | {"TRAIN_FILES": "a.parquet", "VAL_FILES": "b.parquet"})
    assert plan.generated is None
    assert files_at(plan.config, "data.train_files") == [str(Path("a.parquet").absolute())]
    assert at(plan.config, MODEL) == str(SMOLLM_FOLDER.absolute())


def test_a_model_of_ones_own_needs_data_of_ones_own():
    plan = make_plan([], SMOLLM | {"MODEL_PATH": "other/model"})
    assert plan.generated is None


def test_the_cost_of_a_run_names_seconds_phases_and_memory():
    def line(step: int, seconds: float, used_gb: float) -> dict:
        metrics = {
            "timing_s/step": seconds,
            "timing_s/gen": seconds / 4,
            "timing_s/update_actor": seconds / 2,
            "actor/perf/cpu_memory_used_gb": used_gb,
        }
        return {"step": step, "time": 0.0, "metrics": metrics}

    assert cost_line([{"step": 0, "time": 0.0, "metrics": {}}]) is None
    assert cost_line([line(1, 80.0, 9.0), line(2, 40.0, 10.0)]) == (
        "60.0 s a step (policy update 30.0, generation 15.0); at most 10.0 GB of this machine's "
        "memory in use"
    )
