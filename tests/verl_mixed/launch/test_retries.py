"""Which failures a run goes on after, how long it waits, and what ON_END is told."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cluster.ray_cluster import ClusterUnreachable, RayCluster, RayNode
from verl_mixed.launch import retries
from verl_mixed.launch.failure import RunFailed, RunStopped
from verl_mixed.launch.on_end import tell
from verl_mixed.launch.plan import Plan
from verl_mixed.launch.retries import LONGEST_S, PAUSE_S, Retries
from verl_mixed.run.state import RunFolder


def plan_of(cluster: str | None = None, nodes: int = 1) -> Plan:
    config = {"trainer": {"nnodes": nodes}}
    folder = RunFolder(Path("/runs/mine"))
    return cast(Plan, SimpleNamespace(cluster=cluster, config=config, folder=folder))


def failure(cause: str, step: int, mends: bool = True) -> RunFailed:
    return RunFailed(f"{cause}\nmore", cause=cause, step=step, mends=mends)


class Sleeps(list[float]):
    """A clock that only sleeps move."""

    def sleep(self, seconds: float) -> None:
        self.append(seconds)

    def now(self) -> float:
        return sum(self)


def decisions(most: int, *failures: RunFailed) -> tuple[list[bool], list[str], Sleeps]:
    said: list[str] = []
    sleeps = Sleeps()
    again = Retries(most, said.append, sleep=sleeps.sleep, now=sleeps.now)
    return [again.go_on(each, plan_of(), {}) for each in failures], said, sleeps


LOST = "lost node 10.0.0.2 (node0)"


@pytest.mark.parametrize(
    ("most", "failures", "answers", "last"),
    [
        (0, [failure(LOST, 1)], [False], ""),
        (2, [failure(LOST, 1), failure(LOST, 2), failure(LOST, 3)], [True, True, False], "2 times"),
        (9, [failure("CUDA error", 1, mends=False)], [False], "cannot mend"),
        (9, [failure(LOST, 1), failure(LOST, 1)], [True, False], "twice at step 1"),
        (9, [failure("pid 12 died", 1), failure("pid 99 died", 1)], [True, False], "twice"),
        (9, [failure(LOST, 1), failure("killed by SIGKILL", 1), failure(LOST, 1)], [True] * 3, ""),
        (9, [failure(LOST, 1), failure(LOST, 2), failure(LOST, 2)], [True, True, False], "step 2"),
    ],
)
def test_a_failure_is_retried_unless_it_comes_back(
    most: int, failures: list[RunFailed], answers: list[bool], last: str
):
    given, said, _ = decisions(most, *failures)
    assert given == answers
    assert last in (said[-1] if said else "")


def test_the_pause_grows_while_no_step_is_trained():
    causes = [failure(f"cause {chr(97 + number)}", 3) for number in range(9)]
    *_, sleeps = decisions(99, *causes, failure("other", 4))
    assert sleeps[:3] == [PAUSE_S, 2 * PAUSE_S, 4 * PAUSE_S]
    assert max(sleeps) == LONGEST_S
    assert sleeps[-1] == PAUSE_S


def test_the_nodes_of_the_cluster_are_waited_for(monkeypatch: pytest.MonkeyPatch):
    node = RayNode(name="head", ip="10.0.0.1", cpus=2, gpus=0)
    answers: list[Any] = [ClusterUnreachable("no answer"), (node,), (node,), (node, node)]

    def ask(address: str, **_: Any) -> RayCluster:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return RayCluster(nodes=answer, jobs=())

    monkeypatch.setattr(retries, "ask", ask)
    said: list[str] = []
    sleeps = Sleeps()
    again = Retries(3, said.append, sleep=sleeps.sleep, now=sleeps.now)
    assert again.go_on(failure(LOST, 1), plan_of("10.0.0.1:6379", nodes=2), {})
    assert not answers
    assert said[1:] == [
        "waiting for the cluster: no answer",
        "waiting for the cluster: 1 of 2 nodes are there",
    ]

    answers += [ClusterUnreachable("no answer")] * 10_000
    assert not again.go_on(failure(LOST, 2), plan_of("10.0.0.1:6379", nodes=2), {})
    assert said[-1].startswith("not started again: after 1h00m")


def test_the_job_and_the_actors_of_the_killed_run_are_waited_for(monkeypatch: pytest.MonkeyPatch):
    def node(cpus_used: float, gpus_used: float) -> RayNode:
        return RayNode(
            name="head", ip="a", cpus=16, gpus=1, cpus_used=cpus_used, gpus_used=gpus_used
        )

    own, other = (
        f"python -m agent_loop.training.main /runs/{name}/config.yaml" for name in ("mine", "other")
    )
    answers = [
        RayCluster(nodes=(node(9, 1),), jobs=(other, own)),
        RayCluster(nodes=(node(9, 1),), jobs=(other,)),
        RayCluster(nodes=(node(0, 1),), jobs=()),
        RayCluster(nodes=(node(0, 0),), jobs=(other,)),
    ]
    monkeypatch.setattr(retries, "ask", lambda *_, **__: answers.pop(0))
    plan = plan_of("a:6379")
    plan.config["trainer"] |= {"n_gpus_per_node": 1, "v1": {"trainer_mode": "mixed_sync"}}
    said: list[str] = []
    sleeps = Sleeps()
    again = Retries(1, said.append, sleep=sleeps.sleep, now=sleeps.now)
    assert again.go_on(failure(LOST, 1), plan, {})
    assert not answers
    assert said[1] == f"waiting for the cluster: its job has not ended yet: {own}"
    assert said[2].startswith("waiting for the cluster: others use it: ")


def test_a_run_that_is_asked_to_stop_while_it_waits_is_not_started_again():
    asked = [False, True]
    sleeps = Sleeps()
    again = Retries(9, print, is_stopped=lambda: asked.pop(0), sleep=sleeps.sleep)
    with pytest.raises(RunStopped, match="stopped after step 1, as asked"):
        again.go_on(failure(LOST, 1), plan_of(), {})
    assert not asked


def test_a_second_launcher_takes_over_the_count_of_the_first(tmp_path: Path):
    file = tmp_path / "retries.json"
    sleeps = Sleeps()
    record = tmp_path / "failures.jsonl"
    first = Retries(2, print, memory=file, record=record, sleep=sleeps.sleep)
    first.begin()
    assert first.go_on(failure(LOST, 1), plan_of(), {})
    second = Retries(2, print, memory=file, record=record, sleep=sleeps.sleep)
    assert second.recall()
    assert not second.go_on(failure(LOST, 1), plan_of(), {})
    noted = [json.loads(line) for line in record.read_text().splitlines()]
    assert [(line["step"], line["cause"], line["retry"]) for line in noted] == [
        (1, LOST, 1),
        (1, LOST, None),
    ]
    second.end()
    assert not Retries(2, print, memory=file).recall()
    file.write_text("")
    assert Retries(2, print, memory=file).recall()


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ('echo "$RUN_NAME|$RUN_VERDICT|$RUN_CAUSE|$RUN_STEP|$TOLD" >"$RUN_FOLDER/told"', ""),
        ("echo one >&2; echo no route >&2; exit 7", "ON_END ended with exit 7: no route"),
        ("exit 1", "ON_END ended with exit 1"),
    ],
)
def test_the_command_at_the_end_hears_name_verdict_and_cause(
    command: str, said: str, tmp_path: Path
):
    folder = RunFolder(tmp_path / "mine")
    folder.path.mkdir()
    heard: list[str] = []
    tell(command, folder, "failed", LOST, {"TOLD": "x"}, heard.append)
    assert heard == ([said] if said else [])
    if not said:
        assert (folder.path / "told").read_text() == f"mine|failed|{LOST}|0|x\n"
