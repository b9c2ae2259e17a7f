"""The main job in small, on the real Ray, trainer and tool server, in each mode.

Runs are killed with SIGKILL at three moments: the launcher in mid-step, a training worker, and the
trainer's driver in the middle of a checkpoint. After each the same command goes on.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
import pytest

from agent_loop.records.mask_audit import audit_masks
from agent_loop.records.trajectory_record import TRUNCATED
from tests.browser import open_page, viewing
from tests.e2e.jobs import DEADLINE_S, QUOTAS, ROOT, Job, finish, job_of, start
from tests.json_lines import read_lines
from verl_mixed.run.audit import plan_of
from verl_mixed.run.compose import load_config

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1500)]

STEPS = 5

MODES = {
    "sync": [
        # two updates a step, groups of different sizes, a temperature of its own
        "actor_rollout_ref.actor.ppo_mini_batch_size=5",
        "mixed.sources.math.rollout_n=6",
        "mixed.sources.nq.temperature=0.7",
        "mixed.rate_limit.shares={taco: 1, nq: 1, math: 2}",
    ],
    "sync_filtered": [
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.metric=format",
        # entropy alone moves these weights: at the usual rate all groups of a source are soon alike
        "actor_rollout_ref.actor.optim.lr=1.0e-5",
        "ray_kwargs.ray_init.include_dashboard=false",
    ],
    "colocate_async": [
        "trainer.v1.trainer_mode=mixed_colocate_async",
        "mixed.rate_limit.backend=ray",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
        "ray_kwargs.ray_init.include_dashboard=false",
    ],
}
KILLS = {
    "sync": ("launcher", "driver"),
    "sync_filtered": ("worker",),
    "colocate_async": ("stop",),
}
"""Who is killed, or asked to stop; each costs a start of Ray and of the trainer: not everybody in
every mode."""

SEPARATE = [
    "trainer.v1.trainer_mode=mixed_separate_async",
    "trainer.v1.separate_async.parameter_sync_step=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=5",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=tcp_store",
    "ray_kwargs.ray_init.num_gpus=2",
    "ray_kwargs.ray_init.include_dashboard=false",
]

WEIGHTS_ON_POLICY = pytest.approx((1, 1), abs=1e-4)
"""Smallest and largest importance weight of tokens that the current weights sampled. A weight is a
ratio of probabilities, and fp32 keeps the logarithm of a small one to some 1e-6: 1.001e-5 off 1 was
seen. `rollout_probs_diff_max`, a difference of probabilities, stays below 1e-5."""


def wait_for(process: subprocess.Popen[bytes], out: Path, seen: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not seen():
        assert process.poll() is None, out.read_text(errors="replace")[-4000:]
        assert time.monotonic() < deadline, "what was waited for did not come"
        time.sleep(0.005)


def finish_over_kills(job: Job) -> None:
    """Run a job to its end. Three processes are killed, and the command goes on each time."""
    for name, is_due, victim, code in (
        ("launcher", lambda: job.saved() >= 1, None, -signal.SIGKILL),
        ("loops", lambda: job.saved() >= 2, "ray::AgentLoopWorkerTQ", 1),
        ("driver", lambda: job.saved() >= 3, "ray::TaskRunner", 1),
    ):
        with launched(job, f"{name}.txt") as (launcher, out):
            began = job.steps()
            wait_for(launcher, out, lambda b=began, due=is_due: due() and job.steps() > b)
            if victim is None:
                launcher.kill()
            else:
                kill_child(launcher, out, victim)
            found = launcher.wait(timeout=DEADLINE_S)
            assert found == code, out.read_text(errors="replace")[-4000:]
    out = job.work / "last.txt"
    finish(start(job.command, job.work, out), out)


@contextmanager
def launched(job: Job, name: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A launcher and where it writes; ended at the end."""
    out = job.work / name
    launcher = start(job.command, job.work, out)
    try:
        yield launcher, out
    finally:
        launcher.terminate()
        launcher.wait(timeout=60)


def kill_child(launcher: subprocess.Popen[bytes], out: Path, words: str) -> None:
    """Kill the process below the launcher whose command line has these words, as soon as there is
    one: what is due may be due before Ray has started it."""

    def is_killed() -> bool:
        for child in psutil.Process(launcher.pid).children(recursive=True):
            try:
                if words in " ".join(child.cmdline()):
                    child.kill()
                    return True
            except psutil.Error:
                continue  # it ended meanwhile
        return False

    wait_for(launcher, out, is_killed)


@pytest.fixture(
    scope="module",
    params=["sync", "colocate_async", pytest.param("sync_filtered", marks=pytest.mark.nightly)],
)
def job(request: pytest.FixtureRequest, demo: Path, tmp_path_factory) -> Iterator[Job]:
    """A complete run that was killed as often as `KILLS` says."""
    job = job_of(request.param, demo, tmp_path_factory.mktemp("work"), MODES[request.param], STEPS)

    if "launcher" in KILLS[job.mode]:
        with launched(job, "launcher_killed.txt") as (launcher, out):
            wait_for(launcher, out, lambda: job.saved() >= 1 and job.steps() >= 2)
            os.kill(launcher.pid, signal.SIGKILL)

    if "stop" in KILLS[job.mode]:
        with launched(job, "stopped.txt") as (launcher, out):
            wait_for(launcher, out, lambda: job.steps() >= 1)
            asked = [sys.executable, "-m", "verl_mixed", "stop", str(job.folder)]
            stopped = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True)
            assert launcher.wait(timeout=DEADLINE_S) == 130, out.read_text(errors="replace")[-4000:]
        steps = [line["step"] for line in metrics(job.folder)]
        assert steps[-1] == job.saved() < STEPS
        assert f"last step {steps[-1]}, last checkpoint global_step_{steps[-1]}" in stopped.stdout

    for name, is_due, victim in (
        ("worker", lambda: job.saved() >= 3, "ray::WorkerDict"),
        ("driver", job.is_saving, "ray::TaskRunner"),
    ):
        if name not in KILLS[job.mode]:
            continue
        with launched(job, f"{name}_killed.txt") as (launcher, out):
            wait_for(launcher, out, is_due)
            kill_child(launcher, out, victim)
            assert launcher.wait(timeout=DEADLINE_S) == 1, out.read_text(errors="replace")[-4000:]

    finish(start(job.command, job.work, job.work / "last.txt"), job.work / "last.txt")
    yield job


@pytest.fixture(scope="module")
def run(job: Job) -> Path:
    return job.folder


def metrics(run: Path) -> list[dict[str, Any]]:
    return read_lines(run / "metrics.jsonl")


def test_a_killed_run_goes_on_and_every_step_has_one_line(run: Path):
    assert [line["step"] for line in metrics(run)] == list(range(STEPS + 1))


def test_every_trained_batch_holds_exactly_the_planned_prompts(job: Job):
    trained = [line for line in job.ledger() if line.get("outcome") == "trained"]
    for step in range(1, STEPS + 1):
        assert Counter(line["source"] for line in trained if line["step"] == step) == QUOTAS
    for line in metrics(job.folder)[-STEPS:]:
        assert line["metrics"]["mixed/ratio_error/max"] == 0
        assert {s: line["metrics"][f"mixed/{s}/count"] for s in QUOTAS} == QUOTAS


def test_each_source_has_its_own_number_of_trajectories(job: Job):
    sizes = {
        (line["source"], line["trajectories"])
        for line in job.ledger()
        if line.get("outcome") == "trained"
    }
    own = 6 if job.mode == "sync" else 4
    assert sizes == {("math", own), ("nq", 4), ("taco", 4)}


def test_synchronous_training_takes_the_rows_of_a_run_that_was_never_killed(job: Job):
    if job.mode != "sync":
        pytest.skip("which rows survive depends on what the policy sampled")
    plan = plan_of(load_config(job.folder / "config.yaml"))
    trained = [line for line in job.ledger() if "outcome" in line]
    for step in range(1, STEPS + 1):
        own = {(line["source"], line["row"]) for line in trained if line["step"] == step}
        assert own == {(prompt.source, prompt.row) for prompt in plan.take(10)}


def test_filtered_groups_are_in_the_ledger_and_not_in_a_batch(job: Job):
    outcomes = Counter(line.get("outcome") for line in job.ledger())
    assert outcomes["trained"] == 10 * STEPS
    assert (outcomes["filtered"] > 0) == (job.mode == "sync_filtered")
    assert (outcomes["unfinished"] > 0) == (job.mode == "colocate_async")


def test_rollout_and_trainer_agree_on_every_probability(job: Job):
    if job.mode == "colocate_async":
        pytest.skip("its rollouts are of earlier weights")
    for line in metrics(job.folder)[-STEPS:]:
        assert line["metrics"]["training/rollout_probs_diff_max"] < 1e-5


def test_tokens_of_older_weights_are_weighted_and_those_of_the_current_weights_are_not(job: Job):
    lines = [line["metrics"] for line in metrics(job.folder)[-STEPS:]]
    if job.mode != "colocate_async":
        assert not [name for line in lines for name in line if "importance" in name]
        return
    lags, widths = set[float](), list[float]()
    for line in lines:
        for source in QUOTAS:
            own = f"mixed/{source}"
            low, mean, high = (line[f"{own}/importance/{name}"] for name in ("min", "mean", "max"))
            # a token with mask 0 has weight 0, and is in none of the three
            assert 0 < low <= mean <= high <= 2
            lags.add(lag := line[f"{own}/staleness/max"])
            if lag == 0:
                assert (low, high) == WEIGHTS_ON_POLICY
            else:
                widths.append(high - low)
    assert 0 in lags and max(widths) > 1e-3


def test_every_tool_call_passed_the_limiter_in_the_name_of_its_source(job: Job):
    called = set[str]()
    for line in metrics(job.folder):
        granted = {
            source: line["metrics"].get(f"mixed/{source}/limiter/granted", 0) for source in QUOTAS
        }
        # Written while rollouts of the next step may call already; an actor hears late.
        assert line["metrics"].get("mixed/limiter/granted", 0) >= sum(granted.values())
        called |= {source for source, calls in granted.items() if calls}
    # Not in every step: a policy that only entropy moves forgets how to call, and a start counts
    # from nothing.
    assert called == set(QUOTAS)


def test_a_line_has_what_the_optimizer_saw_of_its_row(job: Job):
    for step in range(1, STEPS + 1):
        for line in read_lines(job.folder / "trajectories" / f"{step}.jsonl"):
            assert line["prompt_tokens"] == len(line["prompt_ids"])
            assert line["response_tokens"] == len(line["response_ids"])
            assert line["trained_tokens"] == sum(line["response_mask"]) and line["update"] >= 1
            assert (line["old_log_probs"] is None) == (line["advantage"] is None)
            if line["old_log_probs"] and job.mode.startswith("sync"):  # sampled by these weights
                sampled = sum(line["log_probs"])
                assert line["old_log_probs"]["sum"] == pytest.approx(sampled, abs=1e-3)


def test_the_numbers_of_each_source_are_those_of_its_trajectories_and_its_ledger(job: Job):
    ledger = [line for line in job.ledger() if "outcome" in line]
    for line in metrics(job.folder)[-STEPS:]:
        step = line["step"]
        written = read_lines(job.folder / "trajectories" / f"{step}.jsonl")
        strength = sum(gradient(t) for t in written)
        moving = sum(trained_tokens(t) for t in written if t["advantage"])
        for source in QUOTAS:
            own = [t for t in written if t["source"] == source]
            calls = [call for t in own for call in t["calls"]]
            wanted = {
                "reward/mean": fmean(t["reward"] for t in own),
                "reward/min": min(t["reward"] for t in own),
                "reward/max": max(t["reward"] for t in own),
                "pass_rate": fmean(t["acc"] >= 1 for t in own),
                "turns/mean": fmean(len(t["turns"]) for t in own),
                "generate_s/mean": fmean(sum(x["generate_s"] for x in t["turns"]) for t in own),
                "tools_s/mean": fmean(sum(x["tools_s"] for x in t["turns"]) for t in own),
                "prompt_length/mean": fmean(len(t["prompt_ids"]) for t in own),
                "response_length/mean": fmean(len(t["response_ids"]) for t in own),
                "response_length/max": max(len(t["response_ids"]) for t in own),
                "masked_fraction": fmean(bit == 0 for t in own for bit in t["response_mask"]),
                "tool_calls/mean": len(calls) / len(own),
                "infra_error_rate": 0,
                "truncated_rate": fmean(t["stop_reason"] in TRUNCATED for t in own),
            }
            for part in own[0]["reward_parts"]:
                if part not in ("infra_error", "loop_error"):
                    wanted[f"reward_parts/{part}"] = fmean(t["reward_parts"][part] for t in own)
            for tool, count in Counter(call["tool"] for call in calls if call["tool"]).items():
                wanted[f"tools/{tool}/calls"] = count
            if strength:
                wanted["advantage_share"] = sum(gradient(t) for t in own) / strength
                moved = sum(trained_tokens(t) for t in own if t["advantage"])
                wanted["gradient_token_share"] = moved / moving
            outcomes = Counter(
                entry["outcome"]
                for entry in ledger
                if (entry["source"], entry["step"]) == (source, step)
            )
            assert outcomes["trained"] == line["metrics"][f"mixed/{source}/count"]
            for why in ("filtered", "failed", "stale"):
                assert line["metrics"].get(f"mixed/{source}/evicted/{why}", 0) == outcomes[why]
            found = {name: line["metrics"][f"mixed/{source}/{name}"] for name in wanted}
            assert found == pytest.approx(wanted, rel=1e-4, abs=1e-6)


def trained_tokens(trajectory: dict[str, Any]) -> int:
    return sum(trajectory["response_mask"])


def gradient(trajectory: dict[str, Any]) -> float:
    """Sum of |A| over its tokens in the loss; it has one advantage for all of them."""
    return abs(trajectory["advantage"] or 0.0) * trained_tokens(trajectory)


def test_every_step_has_the_names_that_reports_read(job: Job):
    names = (
        *("count", "judged", "trajectories", "reward/mean", "reward/std", "reward/ci95"),
        *("reward/min", "reward/max", "pass_rate", "solved_all", "generate_s/mean", "tools_s/mean"),
        *("solved_none", "turns/mean", "prompt_length/mean", "response_length/mean"),
        *("response_length/max", "masked_fraction", "tool_calls/mean", "tool_error_rate"),
        *("infra_error_rate", "tool_latency_s/p50", "tool_latency_s/p95", "entropy/mean"),
        *("limiter_wait_s/mean", "server_wait_s/sum", "truncated_rate", "reward_parts/score"),
    )
    of_all = ("mixed/ratio_error/max", "mixed/ratio_error/cumulative_max")
    # A line that a kill took comes back from its checkpoint, which was made in mid-step.
    whole = [line for line in metrics(job.folder) if "timing_s/step" in line["metrics"]]
    assert len(whole) >= STEPS - len(KILLS[job.mode])
    phases = {f"timing_s/{name}" for name in ("gen", "old_log_prob", "adv", "update_actor")}
    assert all(phases | {"timing_s/accounts"} <= line["metrics"].keys() for line in whole)
    for line in metrics(job.folder)[-STEPS:]:
        wanted = {f"mixed/{source}/{name}" for source in QUOTAS for name in names}
        assert wanted | set(of_all) <= line["metrics"].keys()


@pytest.mark.browser
async def test_report_and_viewer_of_a_real_run_open_in_a_browser(job: Job):
    """Screenshots stay in `artefacts/`."""
    artefacts = ROOT / "artefacts"
    artefacts.mkdir(exist_ok=True)
    async with open_page(job.folder / "report.html") as page:
        assert page.requests == [(job.folder / "report.html").as_uri()]
        assert page.console_errors == []
        first_screen = await page.evaluate("document.body.innerText")
        assert "Exact: each of 5 steps trained the planned prompts" in first_screen
        assert all(source in first_screen for source in QUOTAS)
        await page.screenshot(artefacts / f"report-{job.mode}.png", whole=True)
    written = [
        trajectory
        for path in (job.folder / "trajectories").glob("*.jsonl")
        for trajectory in read_lines(path)
    ]
    (first, *_) = read_lines(job.folder / "trajectories" / f"{STEPS}.jsonl")
    ones, length = trained_tokens(first), len(first["response_ids"])
    with viewing(job.folder) as url:
        async with open_page(f"{url}#{STEPS}.1") as page:
            await page.until("document.querySelector('.trajectory')")
            shown = await page.evaluate("document.body.innerText")
            assert f"{len(written)} trajectories" in shown
            assert f"= response {length}; mask ones {ones} = trained tokens {ones}" in shown
            tokens = await page.evaluate("document.querySelectorAll('.segment .token').length")
            assert tokens == length
            assert page.console_errors == []
            await page.screenshot(artefacts / f"viewer-{job.mode}.png")


def test_all_starts_of_a_run_are_one_run_at_weights_and_biases(job: Job):
    run = job.folder
    run_id = (run / "wandb" / "run_id").read_text().strip()
    starts = list((run / "wandb" / "wandb").glob("offline-run-*"))
    assert len(starts) == 1 + len(KILLS[job.mode])
    assert {start.name.rsplit("-", 1)[1] for start in starts} == {run_id}
    assert all(list(start.glob("*.wandb")) for start in starts)
    tables = list((run / "wandb").rglob("trajectories_*.table.json"))
    columns = json.loads(tables[-1].read_text())["columns"]
    assert {"source", "reward", "advantage", "response"} <= set(columns)
    assert "wandb: " not in (run / "train.log").read_text(errors="replace")


def test_the_adaptive_coefficient_of_kl_goes_on_where_the_checkpoint_left_it(job: Job):
    if job.mode != "colocate_async":
        pytest.skip("no KL in the reward")
    lines = [line["metrics"] for line in metrics(job.folder) if line["step"]]
    seen = [line["actor/reward_kl_penalty_coeff"] for line in lines]
    trajectories = sum(QUOTAS.values()) * 4
    for line, before, after in zip(lines, seen, seen[1:], strict=False):
        error = line["actor/reward_kl_penalty"] / 0.1 - 1  # verl's `kl_ctrl.target_kl`
        change = max(-0.2, min(0.2, error)) * trajectories / 10_000  # `kl_ctrl.horizon`
        assert after == pytest.approx(before * (1 + change), rel=1e-6)
    assert len({*seen}) > 1


def test_every_mask_bit_of_the_run_is_accounted_for(run: Path):
    report = audit_masks(run)
    assert report.problems == []
    assert report.trajectories == sum(
        line["trajectories"] for line in read_lines(run / "ledger.jsonl") if "outcome" in line
    )


def test_training_changes_the_weights(run: Path):
    import torch

    def weights(step: int) -> dict[str, Any]:
        path = run / "checkpoints" / f"global_step_{step}" / "actor"
        saved = torch.load(path / "model_world_size_1_rank_0.pt", weights_only=False)
        return {name: weight.to_local() for name, weight in saved.items()}

    before, after = weights(STEPS - 1), weights(STEPS)
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_only_the_last_checkpoints_are_kept_whole(job: Job):
    """Each step saved one, and `max_actor_ckpt_to_keep` is 2."""
    checkpoints = job.folder / "checkpoints"
    assert {path.name for path in checkpoints.glob("global_step_*")} == {
        f"global_step_{step}" for step in (STEPS - 1, STEPS)
    }
    queues = len(list(checkpoints.glob("*/transfer_queue")))
    assert queues == (2 if job.mode == "colocate_async" else 0)


def test_the_run_leaves_a_report_tensorboard_and_its_config(run: Path):
    assert "<svg" in (run / "report.html").read_text()
    assert list((run / "tensorboard").rglob("events.*"))
    assert (run / "config.yaml").exists()
    assert "train" in (run / "command.txt").read_text()


def test_the_same_command_once_more_says_that_the_run_is_complete(job: Job):
    again = start(job.command, job.work, job.work / "again.txt")
    assert "complete" in finish(again, job.work / "again.txt")


def test_nothing_of_the_run_is_left_running(run: Path):
    held = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                held.append((entry / "cmdline").read_bytes())
            except OSError:
                continue  # it ended meanwhile
    assert not [text for text in held if str(run).encode() in text]


def test_the_audit_command_finds_nothing_wrong(run: Path):
    done = subprocess.run(
        [sys.executable, "-m", "verl_mixed", "audit", str(run)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every batch as planned" in done.stdout


@pytest.mark.algorithm
def test_rollout_on_devices_of_its_own_trains_exact_batches_too(demo: Path, tmp_path: Path):
    job = job_of("separate_async", demo, tmp_path, SEPARATE, 2)
    finish(start(job.command, job.work, job.work / "out.txt"), job.work / "out.txt")
    trained = [line for line in job.ledger() if line.get("outcome") == "trained"]
    for step in (1, 2):
        assert Counter(line["source"] for line in trained if line["step"] == step) == QUOTAS
    first, second = (line["metrics"] for line in metrics(job.folder) if line["step"])
    # two updates between weight syncs, and both are held against the weights that sampled
    assert first["training/rollout_probs_diff_max"] < 1e-5
    for source in QUOTAS:
        low, high = f"mixed/{source}/importance/min", f"mixed/{source}/importance/max"
        assert (first[low], first[high]) == WEIGHTS_ON_POLICY
        assert 0 < second[low] <= second[high] <= 2
    audited = subprocess.run(
        [sys.executable, "-m", "verl_mixed", "audit", str(job.folder)], cwd=ROOT, check=False
    )
    assert audited.returncode == 0
