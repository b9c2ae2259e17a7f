"""The files for `ray job submit`, KubeRay and SkyPilot: their fields, commands, settings, nodes.

The schemas beside this file are cut from those of KubeRay and SkyPilot: all names of the levels
that our files use, and the types of what they use.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from agent_loop.training.main import given_to_the_job
from cluster.placement import Node, need_of, placement_problems
from tests.accepted import ROOT, is_shell, refusals
from verl_mixed.launch.plan import make_plan

FOLDER = Path(__file__).parent
RUNTIME_ENV = "cluster/ray_job/runtime_env.yaml"
RAYJOB = "cluster/kuberay/rayjob.yaml"
TASK, VOLUME = "cluster/skypilot/task.yaml", "cluster/skypilot/volume.yaml"
OF_RAY = re.compile(r"RAY_(AUTH_MODE|JOB_STOP_WAIT_TIME_S)")


def read(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def schema(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.schema.json").read_text(encoding="utf-8"))


SKY = schema("skypilot")
CHECKED = (
    (read(RAYJOB), schema("kuberay_rayjob")),
    (read(TASK), SKY["task"]),
    (read(TASK)["resources"], SKY["resources"]),
    (read(VOLUME), SKY["volume"]),
)


@pytest.mark.parametrize(("document", "rules"), CHECKED)
def test_each_file_has_the_fields_of_its_schema_and_no_other(document: Any, rules: Any) -> None:
    jsonschema.validate(document, rules)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**document, "num_nodess": 2}, rules)


def test_a_field_deep_in_a_pod_is_checked_too() -> None:
    document = read(RAYJOB)
    worker = document["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]
    worker["containers"][0]["volumeMount"] = worker["containers"][0].pop("volumeMounts")

    with pytest.raises(jsonschema.ValidationError, match="volumeMount"):
        jsonschema.validate(document, schema("kuberay_rayjob"))


def settings_of(path: str) -> Mapping[str, str]:
    document = read(path)
    if path == TASK:
        return {**document["envs"], "NNODES": str(document["num_nodes"])}
    if path == RAYJOB:
        document = yaml.safe_load(document["spec"]["runtimeEnvYAML"])
    return document["env_vars"]


@pytest.mark.slow
@pytest.mark.parametrize("path", [RUNTIME_ENV, RAYJOB, TASK])
def test_the_settings_of_each_file_are_a_run_that_its_nodes_have_room_for(path: str) -> None:
    settings = settings_of(path)
    of_run = {name: value for name, value in settings.items() if not OF_RAY.fullmatch(name)}

    plan = make_plan([], {**of_run, "RAY_ADDRESS": "10.0.0.1:6379"})

    assert plan.cluster == "10.0.0.1:6379"
    assert plan.folder.path.name == settings["EXPERIMENT_NAME"]
    need = need_of(plan.config)
    assert need is not None and sum(pool.groups for pool in need.pools) == 2
    assert placement_problems(need, nodes_of(path)) == []


def nodes_of(path: str) -> list[Node]:
    gpu_node = Node(cpus=64, gpus=8)
    if path != RAYJOB:
        return [gpu_node, gpu_node]
    cluster = read(RAYJOB)["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    nodes = [(cluster["headGroupSpec"], 1), (workers, workers["replicas"])]
    return [
        Node(cpus=float(limits["cpu"]), gpus=float(limits.get("nvidia.com/gpu", 0)))
        for group, count in nodes
        for limits in [group["template"]["spec"]["containers"][0]["resources"]["limits"]] * count
    ]


def test_the_ray_of_the_image_is_the_one_of_the_lock_file() -> None:
    version = read(RAYJOB)["spec"]["rayClusterSpec"]["rayVersion"]

    assert f"\nray=={version}" in (ROOT / "requirements/gpu.lock").read_text().replace(
        "[default]", ""
    )


def test_each_command_of_the_files_is_accepted() -> None:
    task = read(TASK)
    script = task["setup"] + task["run"]
    lines = [read(RAYJOB)["spec"]["entrypoint"], *script.splitlines()]
    words = re.compile(r"joined|words|name=|address=|if |else|fi$|until |exit|export |set |cd ")

    assert is_shell(script) == ""
    tried = [line for line in map(str.strip, lines) if not words.match(line)]
    assert [
        why for line in tried for why in refusals(line.removeprefix("~/verl_mixed_venv/bin/"))
    ] == []
    starts = re.findall(r"ray start [^|;]*\$words", script)
    options = re.search(r'words="(.*)"', script)
    assert len(starts) == 2 and options is not None
    filled = [start.replace("$words", re.sub(r"\$\w+", "1", options[1])) for start in starts]
    assert [why for start in filled for why in refusals(start)] == []
    assert refusals(f"{filled[0]} --num-gpuss=1") != []


def test_variables_of_a_job_are_known_because_ray_sends_them_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)
    assert given_to_the_job() == set()

    job = {"runtime_env": {"working_dir": "gcs://a.zip", "env_vars": {"NCCL_DEBUG": "WARN"}}}
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps(job))
    assert given_to_the_job() == {"NCCL_DEBUG"}
