"""What a run asks of the cluster that it joins; the head is a stand-in here."""

import socket
from dataclasses import replace

import pytest

from agent_loop.training.main import is_forwarded
from cluster import cluster_watch
from cluster.cluster_watch import ClusterWatch, own_ip
from cluster.ray_cluster import (
    ClusterUnreachable,
    DeadActor,
    RayCluster,
    RayNode,
    address_of,
    ask,
)
from tests.cluster.test_placement import config_of
from verl_mixed.checks.machine import ray_cluster
from verl_mixed.checks.machine.ray_cluster import cluster_problems
from verl_mixed.launch.processes import RUN_MARK

ADDRESS = "10.0.0.1:6379"
RUN = "/srv/runs/mine/config.yaml"


def node(ip: str) -> RayNode:
    return RayNode(name=ip, ip=ip, cpus=8, gpus=1)


class Head:
    """Answers with the nodes it was given last, or not at all."""

    def __init__(self, *ips: str, jobs: tuple[str, ...] = ()) -> None:
        self.ips, self.jobs, self.questions = list(ips), jobs, 0
        self.cpus_used = 0.0
        self.dead: tuple[DeadActor, ...] = ()

    def __call__(self, address: str, *, environ: object = None) -> RayCluster:
        self.questions += 1
        if not self.ips:
            raise ClusterUnreachable(f"no answer from {address}")
        nodes = tuple(replace(node(ip), cpus_used=self.cpus_used) for ip in self.ips)
        return RayCluster(nodes=nodes, jobs=self.jobs, dead_actors=self.dead)


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Head:
    answering = Head("10.0.0.1", "10.0.0.2")
    monkeypatch.setattr(cluster_watch, "ask", answering)
    monkeypatch.setattr(ray_cluster, "ask", answering)
    monkeypatch.setattr(cluster_watch, "EVERY_S", 3600.0)
    return answering


def test_a_cluster_with_all_nodes_and_no_job_is_good(head: Head) -> None:
    assert cluster_problems({"trainer": {"nnodes": 2}}, ADDRESS) == []


def test_missing_nodes_are_named(head: Head) -> None:
    (few,) = cluster_problems({"trainer": {"nnodes": 3}}, ADDRESS)
    assert "trainer.nnodes=3: the cluster at 10.0.0.1:6379 has 2 nodes (10.0.0.1, 10.0.0.2)" in few


@pytest.mark.parametrize("used", [0.0, 8.0])
def test_a_run_starts_beside_another_job_where_there_is_room(head: Head, used: float) -> None:
    head.jobs, head.cpus_used = ("python other.py",), used
    problems = cluster_problems(config_of(), ADDRESS)
    if used:
        (busy,) = problems
        assert "has no room beside its jobs (python other.py): the run takes 1 logical GPUs" in busy
    else:
        assert problems == []


def test_a_head_that_does_not_answer_is_the_only_problem(head: Head) -> None:
    head.ips = []
    assert cluster_problems({"trainer": {"nnodes": 3}}, ADDRESS) == [f"no answer from {ADDRESS}"]


def test_a_node_that_is_lost_is_named_though_the_trainer_failed_before(head: Head) -> None:
    with ClusterWatch(ADDRESS, {}, RUN) as watch:
        assert watch.lost == ""
        head.ips.remove("10.0.0.2")
        reason = "RuntimeError: Connection closed by peer [10.0.0.2]:17544"
        assert watch.explain(reason) == "lost node 10.0.0.2: Ray's head does not see it any more"


def test_a_dead_actor_is_named_but_not_one_of_another_run_or_that_is_replaced(head: Head) -> None:
    with ClusterWatch(ADDRESS, {}, RUN) as watch:
        head.dead = (
            DeadActor(name="NodeToolServer", place="pid 7 on 10.0.0.1", job=f"python {RUN}"),
            DeadActor(name="WorkerDict", place="pid 8 on 10.0.0.1", job="python /runs/other.yaml"),
        )
        watch._look()
        assert watch.lost_actor == ""
        head.dead += (
            DeadActor(name="SimpleStorageUnit", place="pid 9 on 10.0.0.2", job=f"python {RUN}"),
        )
        watch._look()
    words = "the process of an actor died: SimpleStorageUnit (pid 9 on 10.0.0.2)"
    assert watch.lost_actor == words
    assert watch.lost == ""


def test_a_trainer_that_fails_of_itself_waits_for_no_node(head: Head) -> None:
    with ClusterWatch(ADDRESS, {}, RUN) as watch:
        asked = head.questions
        assert watch.explain("ValueError: broken on purpose") == ""
        assert head.questions == asked


@pytest.mark.slow
@pytest.mark.parametrize(
    "reason", ["ActorDiedError: the actor died", "exit 1: /lib/libc.so.6(+0x1098ec) [0x7f99]"]
)
def test_a_head_is_lost_after_several_questions_without_an_answer(reason: str, head: Head) -> None:
    with ClusterWatch(ADDRESS, {}, RUN) as watch:
        head.ips.clear()
        words = watch.explain(reason)
    assert words.startswith("lost the head: no answer")
    assert head.questions == 1 + cluster_watch.UNANSWERED


@pytest.mark.slow
def test_a_port_where_nothing_listens_is_told_from_one_that_refuses_us() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        closed = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ClusterUnreachable, match=f"{closed}: nothing listens there"):
            ask(closed)
        listener.listen()
        with pytest.raises(
            ClusterUnreachable, match=r"RAY_AUTH_MODE='token'.* set RAY_AUTH_MODE=disabled"
        ):
            ask(closed, environ={"RAY_AUTH_MODE": "token"}, timeout_s=3)


def test_the_address_is_the_heads_and_its_port_is_rays_unless_given() -> None:
    assert address_of({}) is None and address_of({"MASTER_IP": " "}) is None
    assert address_of({"MASTER_IP": "10.0.0.1"}) == ADDRESS
    assert address_of({"MASTER_IP": "10.0.0.1", "RAY_PORT": "7"}) == "10.0.0.1:7"


def test_the_own_address_on_the_way_to_the_head_is_found() -> None:
    assert own_ip("127.0.0.1:6379") == "127.0.0.1"


def test_workers_on_a_cluster_do_not_carry_the_mark_by_which_a_run_is_ended() -> None:
    assert not is_forwarded(RUN_MARK)
    for name in (
        *("WANDB_API_KEY", "TOOL_SERVER_TOKEN", "JUDGE_API_KEY", "JUDGE_BASE_URL"),
        *("NCCL_DEBUG", "VERL_LOGGING_LEVEL"),
    ):
        assert is_forwarded(name)
    assert not is_forwarded("PATH")
