"""Files of a run as its trainer and launcher write them, small and made up."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_mixed.run.compose import save_config
from verl_mixed.run.state import RunFolder


def metrics_line(step: int, moment: float | None = None, **more: float) -> dict[str, Any]:
    """A line of `metrics.jsonl` of two sources; names have `__` for `/`."""
    metrics = {
        "mixed/math/reward/mean": min(1.0, 0.1 + step / 100),
        "mixed/math/count": 8.0,
        "mixed/math/pass_rate": 0.5,
        "mixed/nq/reward/mean": 0.25,
        "mixed/nq/count": 4.0,
        "mixed/nq/pass_rate": 0.25,
        "mixed/ratio_error/max": 0.0,
        "mixed/ratio_error/cumulative_max": 0.5,
        "mixed/tools/python/calls": 40.0,
        "mixed/tools/python/error_rate": 0.25,
        "mixed/tools/python/latency_s/p50": 0.5,
        "mixed/tools/python/latency_s/p95": 2.0,
        "mixed/limiter/utilisation": 0.4,
        "mixed/limiter/granted": 1234.0,
        "mixed/limiter/waiting": 3.0,
        "timing_s/gen": 6.0,
        "timing_s/update_actor": 3.0,
        "timing_s/step": 10.0,
    }
    if step % 5 == 0:
        metrics |= {"mixed/math/val/reward/mean": 0.2 + step / 50, "mixed/math/val/count": 100.0}
        metrics |= {"mixed/nq/val/reward/mean": 0.25, "mixed/nq/val/count": 100.0}
    if step == 0:
        metrics = {name: value for name, value in metrics.items() if "/val/" in name}
    metrics |= {name.replace("__", "/"): value for name, value in more.items()}
    return {"step": step, "time": 10.0 * step if moment is None else moment, "metrics": metrics}


def add_line(path: Path, line: Mapping[str, Any]) -> None:
    """Append one line of JSON."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def run_of(
    path: Path, steps: int, total_steps: int = 20, config: Mapping[str, Any] | None = None
) -> RunFolder:
    """A run's folder after some steps, that nobody runs; None takes a small config."""
    path.mkdir(parents=True)
    folder = RunFolder(path)
    save_config(config or {"trainer": {"total_training_steps": total_steps}}, folder.config)
    folder.log.write_text("ray init kwargs: {}\n")
    for step in range(steps + 1):
        add_line(folder.metrics, metrics_line(step))
    return folder
