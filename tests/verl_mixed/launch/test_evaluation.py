"""The launcher of an evaluation, with a stand-in for its driver."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent_loop.evaluation.main import Job
from agent_loop.evaluation.selection import Selection
from agent_loop.records.evaluation_records import read_records
from config.schema import ConfigError
from verl_mixed.launch.evaluation import Target, evaluate, evaluation_config
from verl_mixed.launch.failure import RunFailed
from verl_mixed.launch.plan import Plan
from verl_mixed.run.evaluations import Evaluation
from verl_mixed.run.state import RunFolder, RunHeld

DRIVER = (sys.executable, "-m", "tests.fakes.evaluation_driver")
WEIGHTS = {"step": "2", "file model.pt": "10 bytes of mtime_ns=1"}
CONFIG: dict[str, Any] = {
    "data": {"val_files": ["x.parquet"]},
    "mixed": {"run_dir": "/run", "infra_error_limit": 0.5},
    "trainer": {"device": "cpu", "nnodes": 1, "n_gpus_per_node": 2},
    "ray_kwargs": {"ray_init": {"num_cpus": 4, "dashboard_port": 8265, "include_dashboard": True}},
    "actor_rollout_ref": {
        "model": {"path": "/base", "lora_rank": 8, "lora": {"rank": 8}},
        "rollout": {
            "name": "hf",
            "load_format": "dummy",
            "nnodes": 0,
            "n_gpus_per_node": 8,
            "checkpoint_engine": {"backend": "nccl"},
            "multi_turn": {"tool_config": {"server_url": "http://127.0.0.1:1"}},
        },
    },
}


def target(tmp_path: Path, label: str = "step_2", **selection: Any) -> Target:
    folder = RunFolder(tmp_path / "evaluations" / label)
    config = evaluation_config(CONFIG, folder=folder, model="/m", is_exported=True, base_url="")
    plan = Plan(
        config=config,
        folder=folder,
        own_tool_server=False,
        generated=None,
        changed=frozenset(),
        added=frozenset(),
    )
    job = Job(step=2, selection=Selection(**{"samples": 2, **selection}))
    return Target(label=label, plan=plan, job=job, ks=(1, 2), weights="step 2", identity=WEIGHTS)


def run(
    targets: Sequence[Target], said: list[str] | None = None, **options: Any
) -> list[Evaluation]:
    environ = os.environ | {"PYTHONPATH": os.getcwd()}
    say = (said if said is not None else []).append
    return evaluate(targets, environ, say, driver=DRIVER, **options)


def starts(one: Target) -> int:
    return len((one.plan.folder.path / "starts").read_text().split())


def test_an_evaluation_has_its_records_and_results_in_a_folder_of_its_own(tmp_path: Path):
    one, said = target(tmp_path), list[str]()
    (done,) = run([one], said)
    folder = one.plan.folder.path
    assert len(done.records) == 20 == len(read_records(folder / "records.jsonl")[0])
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["sources"]["nq"]["reward"]["mean"] == pytest.approx(0.4)
    assert summary["sources"]["nq"]["pass_at"].keys() == {"1", "2"}
    assert (folder / "summary.csv").read_text().startswith("source,label,step,prompts,")
    assert any("20 trajectories" in line for line in said)


def test_a_second_call_starts_nothing(tmp_path: Path):
    one = target(tmp_path)
    assert run([one]) == run([one])
    assert starts(one) == 1


def test_a_killed_driver_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole, killed = target(tmp_path, "whole"), target(tmp_path, "killed")
    run([whole])
    monkeypatch.setenv("FAKE_DRIVER", "killed")
    with pytest.raises(RunFailed, match=r"killed by SIGKILL.*\n.*The same command goes on"):
        run([killed])
    assert not (killed.plan.folder.path / "summary.json").exists()
    monkeypatch.setenv("FAKE_DRIVER", "")
    run([killed])
    assert starts(killed) == 2
    files = [each.plan.folder.path / "records.jsonl" for each in (whole, killed)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_more_rows_and_samples_keep_what_is_there_and_fewer_are_counted_alone(tmp_path: Path):
    (few,) = run([target(tmp_path, limit=1, samples=1)])
    (more,) = run([target(tmp_path)])
    (again,) = run([target(tmp_path, limit=1, samples=1)])
    assert (len(few.records), len(more.records)) == (2, 20)
    assert again == few


def test_other_settings_need_another_label(tmp_path: Path):
    run([target(tmp_path)])
    other = target(tmp_path)
    other.plan.config["actor_rollout_ref"]["model"]["path"] = "/other"
    with pytest.raises(ConfigError, match=r"model\.path: '/m' -> '/other'.*another --label"):
        run([other])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"file model.pt": "10 bytes of mtime_ns=2"}, r"weights: file model\.pt: .*=1' -> .*=2'"),
        ({"base_url": "http://b/v1"}, r"weights: base_url: 'absent' -> 'http://b/v1'"),
    ],
)
def test_other_weights_need_another_label(tmp_path: Path, other: dict[str, str], message: str):
    one = target(tmp_path)
    run([one])
    with pytest.raises(ConfigError, match=rf"{message} in .*; give another --label, or remove"):
        run([replace(one, identity=WEIGHTS | other)])
    (one.plan.folder.path / "weights.json").unlink()  # of a release that did not keep it
    with pytest.raises(ConfigError, match=r"weights: step: 'absent' -> '2'"):
        run([one])
    assert starts(one) == 1


def test_a_run_whose_mixture_may_change_has_evaluations_of_one_mixture(tmp_path: Path):
    one, other = target(tmp_path), target(tmp_path)
    for each, turns in ((one, 4), (other, 5)):
        sources = {"nq": {"max_turns": turns}}
        each.plan.config["mixed"] |= {"on_change": "continue", "seed": turns, "sources": sources}
    run([one])
    with pytest.raises(ConfigError) as refused:
        run([other])
    assert [problem.partition(" in ")[0] for problem in refused.value.problems] == [
        "mixed.seed: 4 -> 5",
        "mixed.sources.nq.max_turns: 4 -> 5",
    ]


def test_two_processes_do_not_evaluate_into_one_folder(tmp_path: Path):
    one = target(tmp_path)
    with one.plan.folder.claim(), pytest.raises(RunHeld):
        run([one])


def test_lost_trajectories_are_run_again_only_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    one = target(tmp_path)
    monkeypatch.setenv("FAKE_DRIVER", "lost")
    run([one])
    monkeypatch.setenv("FAKE_DRIVER", "")
    (still,) = run([one])
    assert all(record.lost for record in still.records)
    (again,) = run([one], retry_lost=True)
    assert not any(record.lost for record in again.records)


def test_the_config_of_an_evaluation_loads_weights_from_disk_and_disturbs_no_run():
    folder = RunFolder(Path("/run/evaluations/step_2"))
    config = evaluation_config(CONFIG, folder=folder, model="/m", is_exported=True, base_url="")
    model, rollout = (config["actor_rollout_ref"][name] for name in ("model", "rollout"))
    assert (model["path"], model["lora_rank"], model["lora"]["rank"]) == ("/m", 0, 0)
    assert (rollout["name"], rollout["load_format"]) == ("hf", "auto")
    assert (rollout["nnodes"], rollout["n_gpus_per_node"]) == (1, 2)
    assert rollout["checkpoint_engine"]["backend"] == "naive"
    assert config["mixed"]["run_dir"] == "/run/evaluations/step_2"
    assert config["ray_kwargs"]["ray_init"] == {"num_cpus": 4, "include_dashboard": False}
    assert CONFIG["mixed"]["run_dir"] == "/run"  # the run's own config is not changed
    kept = evaluation_config(CONFIG, folder=folder, model="/m", is_exported=False, base_url="http")
    assert kept["actor_rollout_ref"]["model"]["lora_rank"] == 8
    assert kept["actor_rollout_ref"]["rollout"]["name"] == "openai"
