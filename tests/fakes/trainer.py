"""A stand-in for the training process: keeps a run's books as the trainer does, trains nothing.

`python -m tests.fakes.trainer CONFIG`. `FAKE_TRAINER` chooses the ending: good (default), error,
hang, forgets: it removes its ledger, stop: it waits until it is asked to stop, or tools: it kills
the run's own tool server and waits until the address answers again. Each start adds its first step
as a line to `starts` in the run's folder. Each step leaves a checkpoint without weights, and a
start goes on from a checkpoint as verl's trainer does.
"""

import json
import os
import signal
import sys
import time
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

from agent_loop.records.run_folder import STOP_FILE, MetricsFile
from agent_loop.records.trajectory_record import Segment, TrajectoryRecord, line_of
from config.lookup import at
from config.schema import TOOL_CONFIG
from samplers.ledger import Ledger, LedgerEntry
from verl_mixed.checks.machine.services import read_health
from verl_mixed.run.audit import plan_of
from verl_mixed.run.compose import load_config


def main(config_path: str) -> None:
    config = load_config(Path(config_path))
    folder = Path(config_path).parent
    plan = plan_of(config)
    print("Started a local Ray instance. View the dashboard at http://127.0.0.1:8299", flush=True)
    ledger = Ledger(folder / "ledger.jsonl")
    checkpoints = folder / "checkpoints"
    tracker, trainer = checkpoints / "latest_checkpointed_iteration.txt", config["trainer"]
    done = int(tracker.read_text()) if tracker.exists() else 0
    if trainer["resume_mode"] != "auto":
        tracker.unlink(missing_ok=True)
        path = trainer["resume_from_path"]
        done = 0 if trainer["resume_mode"] == "disable" else int(path.split("global_step_")[1])
    with (folder / "starts").open("a") as file:
        file.write(f"{done + 1}\n")
    ledger.rewind(done)
    MetricsFile(folder / "metrics.jsonl").rewind(done or -1, None)
    ledger.begin(plan.description())
    plan.drawn.update(plan.counts_between(0, ledger.last_step * plan.batch_size))
    total = int(at(config, "trainer.total_training_steps"))
    for step in range(done + bool(done), total + 1):
        metrics = {f"mixed/{source}/val/reward/mean": 0.25 + step / 10 for source in plan.sources}
        if step:
            plan.position = (step - 1) * plan.batch_size
            entries = [
                LedgerEntry(
                    step=step,
                    source=prompt.source,
                    draw=prompt.draw,
                    row=prompt.row,
                    row_id="",
                    outcome="trained",
                    trajectories=2,
                    reward_mean=0.5,
                )
                for prompt in plan.take(plan.batch_size)
            ]
            ledger.append_step(step, entries, plan.drawn)
            (checkpoints / f"global_step_{step}").mkdir(parents=True, exist_ok=True)
            (checkpoints / f"global_step_{step}" / "data.pt").touch()
            tracker.write_text(str(step))
            trajectory = TrajectoryRecord(
                step=step,
                key="a_0_0",
                stop_reason="answered",
                response_ids=[5, 6],
                response_mask=[1, 0],
                log_probs=[-0.5, 0.0],
                engine_turns=[[5]],
                segments=[Segment("model", 0, 1, "a"), Segment("tool", 1, 1, "b")],
            )
            (folder / "trajectories").mkdir(exist_ok=True)
            (folder / "trajectories" / f"{step}.jsonl").write_bytes(line_of(trajectory))
            rewards = {"mean": 0.5, "min": 0.0, "max": 1.0, "std": 0.4}
            for source in plan.sources:
                metrics |= {f"mixed/{source}/reward/{name}": x for name, x in rewards.items()}
            metrics |= {f"mixed/{s}/count": n for s, n in plan.counts(step - 1).items()}
            metrics["mixed/ratio_error/max"] = 0.0
        with (folder / "metrics.jsonl").open("a") as file:
            line = {"step": step, "time": time.time(), "metrics": metrics}
            file.write(json.dumps(line) + "\n")
        if step == 1 and os.environ.get("FAKE_TRAINER") == "error":
            raise ValueError(os.environ.get("FAKE_ERROR", "broken on purpose"))
        if step == 1 and os.environ.get("FAKE_TRAINER") == "hang":
            time.sleep(600)
        if step == 1 and os.environ.get("FAKE_TRAINER") == "tools":
            kill_tool_server(folder, at(config, f"{TOOL_CONFIG}.server_url"))
        if step == 1 and os.environ.get("FAKE_TRAINER") == "stop":
            while not (folder / STOP_FILE).exists():
                time.sleep(0.02)
            return
    if os.environ.get("FAKE_TRAINER") == "forgets":
        (folder / "ledger.jsonl").unlink()


def kill_tool_server(folder: Path, url: str) -> None:
    """Kill the server, and wait for one with another pid that takes this process's token."""

    def answering() -> Any:
        with suppress(OSError, ValueError, HTTPException):
            health = json.loads(read_health(url, os.environ, timeout_s=5))
            pid = json.loads((folder / "tool_server.json").read_text())["pid"]
            return pid if "tools" in health else None

    os.kill(killed := answering(), signal.SIGKILL)
    while answering() in (None, killed):
        time.sleep(0.02)


if __name__ == "__main__":
    main(sys.argv[1])
