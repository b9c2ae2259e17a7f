"""Real runs among faults: tools that fail, hang and lie, loops that raise or are not ours."""

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_loop.records.mask_audit import audit_masks
from tests.e2e.jobs import DEADLINE_S, QUOTAS, ROOT, Job, finish, job_of, start
from tests.e2e.test_training import SEPARATE
from tests.fakes.chaos_proxy import ChaosProxy
from tests.json_lines import read_lines

pytestmark = [pytest.mark.nightly, pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 3
TOOLS = "actor_rollout_ref.rollout.multi_turn.tool_config"
COMMON = [
    "trainer.val_before_train=false",
    "trainer.save_freq=-1",
    "ray_kwargs.ray_init.include_dashboard=false",
]

OWN_LOOP = """
import random

from agent_loop.tool_actions import calculate
from agent_loop.turn_agent_loop import TaggedAgentLoop


class LookupAgentLoop(TaggedAgentLoop):
    actions = ("lookup", "answer")
    own_tags = {"lookup": ("<code>", "</code>")}

    async def act(self, action, extras):
        if random.random() < 0.1:
            raise ValueError("the lookup table is torn")
        return await calculate(self.client, action.content)
"""


@pytest.fixture(scope="module")
def tool_server(demo: Path, tmp_path_factory) -> Iterator[str]:
    """URL of a real tool server."""
    ready = tmp_path_factory.mktemp("tools") / "ready.json"
    corpus = ["--corpus", str(demo / "corpus.jsonl"), "--port", "0", "--ready-file", str(ready)]
    server = subprocess.Popen(
        [sys.executable, "-m", "verl_mixed", "serve-tools", "--no-token", *corpus],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not ready.exists():
            assert server.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        yield json.loads(ready.read_text())["url"]
    finally:
        server.terminate()
        server.wait(60)


def trajectories(job: Job) -> list[dict[str, Any]]:
    files = sorted((job.folder / "trajectories").glob("*.jsonl"))
    return [record for path in files for record in read_lines(path)]


def assert_exact(job: Job, steps: int) -> None:
    trained = [line for line in job.ledger() if line.get("outcome") == "trained"]
    for step in range(1, steps + 1):
        assert Counter(line["source"] for line in trained if line["step"] == step) == QUOTAS


@pytest.fixture(scope="module")
def chaos(demo: Path, tool_server: str, tmp_path_factory) -> Iterator[tuple[Job, ChaosProxy]]:
    """A run whose tools go wrong in 5 % of the requests, and one of whose loops raises."""
    work = tmp_path_factory.mktemp("chaos")
    (work / "my_loops.py").write_text(OWN_LOOP)
    agents = (ROOT / "config" / "agent_loops.yaml").read_text()
    (work / "agents.yaml").write_text(
        agents + "\n- name: lookup_agent\n  _target_: my_loops.LookupAgentLoop\n"
    )
    with ChaosProxy(tool_server, share=0.05).serving() as proxy:
        overrides = [
            *COMMON,
            f"{TOOLS}.server_url={proxy.url}",
            f"{TOOLS}.timeout=10",
            f"{TOOLS}.max_retries=1",
            f"actor_rollout_ref.rollout.agent.agent_loop_config_path={work}/agents.yaml",
            "mixed.sources.math.agent=lookup_agent",
            "mixed.sources.nq.observation_style=chat",
            "mixed.deadlines.step_s=120",
            "mixed.infra_error_limit=1",
            "actor_rollout_ref.rollout.n=8",
        ]
        job = job_of("chaos", demo, work, overrides, STEPS)
        finish(start(job.command, work, work / "out.txt"), work / "out.txt")
        yield job, proxy


def test_among_faults_every_step_finishes_and_every_batch_is_exact(chaos):
    job, proxy = chaos
    assert_exact(job, STEPS)
    assert proxy.did["failed"] + proxy.did["hung"] + proxy.did["garbled"] > 0


def test_a_lost_trajectory_has_no_gradient_and_every_other_bit_is_accounted_for(chaos):
    job, _ = chaos
    assert audit_masks(job.folder).problems == []
    for record in trajectories(job):
        assert (record["stop_reason"] == "infra_error") == (record["fault"] is not None)
        assert not (record["fault"] and any(record["response_mask"]))


def test_a_tool_that_hangs_loses_its_trajectory_and_nothing_else_waits_for_it(chaos):
    job, proxy = chaos
    lost = [r for r in trajectories(job) if r["stop_reason"] == "infra_error"]
    assert proxy.did["left"] == proxy.did["hung"]  # every hung request was closed by its client
    if proxy.did["hung"]:
        assert any("timeout=10" in r["fault"] for r in lost)
    assert len([r for r in trajectories(job) if r["stop_reason"] == "deadline"]) == 0


def test_a_loop_from_outside_the_repository_runs_and_what_it_raises_is_counted(chaos):
    job, _ = chaos
    raised = [r for r in trajectories(job) if r["loop_error"] is not None]
    assert {r["source"] for r in raised} <= {"math"}
    lines = read_lines(job.folder / "metrics.jsonl")
    counted = sum(line["metrics"]["mixed/math/loop_error_rate"] * 4 * 8 for line in lines)
    assert round(counted) == len(raised)
    calls = [call for r in trajectories(job) for call in r["calls"] if r["source"] == "math"]
    assert {call["action"] for call in calls} <= {"lookup", "malformed"}
    if raised:
        log = (job.folder / "train.log").read_text(errors="replace")
        assert log.count("Traceback") >= 1 and "the lookup table is torn" in log


def test_nothing_drifts_and_every_part_of_a_call_is_on_disk(chaos):
    job, _ = chaos
    for line in read_lines(job.folder / "metrics.jsonl"):
        assert line["metrics"]["mixed/drift/found"] == 0
        assert line["metrics"]["mixed/drift/checked"] == 80 / 16
    for record in trajectories(job):
        assert len(record["turns"]) == len(record["engine_turns"])
        assert {"score", "acc", "format"} <= record["reward_parts"].keys()
        for call in record["calls"]:
            assert call["status"] in ("ok", "rejected", "unavailable", "failed", "cancelled")


@pytest.mark.algorithm
def test_a_run_whose_tools_are_gone_stops_and_says_so(demo: Path, tool_server: str, tmp_path: Path):
    with ChaosProxy(tool_server, share=1.0).serving() as proxy:
        overrides = [
            *COMMON,
            f"{TOOLS}.server_url={proxy.url}",
            f"{TOOLS}.timeout=1",
            f"{TOOLS}.max_retries=0",
            "mixed.sources.nq.agent=single_turn_agent",
            "mixed.infra_error_limit=0.01",
        ]
        job = job_of("rubble", demo, tmp_path, overrides, STEPS)
        out = tmp_path / "out.txt"
        said = finish(start(job.command, tmp_path, out), out, expected=1)
        assert "mixed.infra_error_limit=0.01" in said
        assert proxy.url in said
    assert [line for line in job.ledger() if line.get("outcome") == "trained"] == []


@pytest.mark.algorithm
def test_loops_that_are_not_ours_and_an_ablation_without_masking(demo: Path, tmp_path: Path):
    overrides = [
        *COMMON,
        "data.max_prompt_length=900",
        "mixed.sources.taco.agent=tool_agent",
        "mixed.sources.math.agent=react_agent",
        "mixed.sources.math.observation_style=chat",
        f"{TOOLS}.state_masking=false",
    ]
    job = job_of("others", demo, tmp_path, overrides, 1)
    said = finish(start(job.command, tmp_path, tmp_path / "out.txt"), tmp_path / "out.txt")
    assert_exact(job, 1)
    assert audit_masks(job.folder).problems == []
    assert "state_masking=false" in said
    assert "state_masking=false" in (job.folder / "report.html").read_text()
    assert all(record["loop_error"] is None for record in trajectories(job))


@pytest.mark.algorithm
@pytest.mark.parametrize("mode", ["colocate_async", "separate_async"])
def test_a_slow_search_has_more_groups_open_and_every_batch_stays_exact(
    demo: Path, tool_server: str, tmp_path: Path, mode: str
):
    steps, bound = 8, 6
    settings = [
        *COMMON,
        *(SEPARATE if mode == "separate_async" else []),
        f"trainer.v1.trainer_mode=mixed_{mode}",
        f"trainer.v1.sampler.max_off_policy_threshold={bound}",
        # nothing but the search is slow: no limit of calls, and no call is answered from the cache
        f"{TOOLS}.max_workers=200",
        f"{TOOLS}.cache.store=none",
    ]
    with ChaosProxy(tool_server, share=0.0, delays_s={"/retrieve": 15.0}).serving() as proxy:
        job = job_of(mode, demo, tmp_path, [*settings, f"{TOOLS}.server_url={proxy.url}"], steps)
        finish(start(job.command, job.work, tmp_path / "out.txt"), tmp_path / "out.txt")
    assert_exact(job, steps)
    lines = [line["metrics"] for line in read_lines(job.folder / "metrics.jsonl") if line["step"]]
    last = lines[-1]
    for other in ("math", "taco"):
        assert last["mixed/nq/lead/flight_s"] > 2 * last[f"mixed/{other}/lead/flight_s"]
        assert last["mixed/nq/lead/groups"] > last[f"mixed/{other}/lead/groups"]
    for metrics in lines:
        assert metrics["mixed/ratio_error/max"] == 0
        assert metrics["mixed/nq/staleness/max"] < bound
