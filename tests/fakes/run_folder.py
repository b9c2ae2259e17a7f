"""The folder of a run that never was: config, metrics and ledger as the trainer writes them.

Numbers are drawn from a seed; counts per source are those of the plan, so that a report of it finds
the mixture exact. `benchmarks.report` uses it for a long run.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agent_loop.records.run_folder import write_lines
from samplers.ledger import Ledger, LedgerEntry
from samplers.mixture_plan import MixturePlan
from verl_mixed.run.compose import save_config

SOURCES = ("math", "nq", "taco")
TOOLS = {"math": "code", "nq": "search", "taco": "code"}
START_TIME = 1_700_000_000.0


def write_run(
    folder: Path,
    steps: int,
    *,
    total: int | None = None,
    sources: Sequence[str] = SOURCES,
    batch_size: int = 20,
    test_freq: int = 10,
    seed: int = 0,
    config: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Write a run that trained some steps, and return the lines of its `metrics.jsonl`.

    Args:
        folder: made.
        steps: trained so far; 0 leaves a run that has only validated.
        total: steps it is to train; None: those it has, and it ended by itself.
        sources: at least one.
        batch_size: prompts a step.
        test_freq: steps between validations.
        seed: of all numbers.
        config: added to its config.
    """
    folder.mkdir(parents=True)
    rng = random.Random(seed)
    plan = MixturePlan(
        sizes=dict.fromkeys(sources, 1000),
        ratios={source: 1.0 + (i == 0) for i, source in enumerate(sources)},
        batch_size=batch_size,
        seed=seed,
    )
    trainer = {"total_training_steps": total or steps, "seed": seed}
    save_config({"trainer": trainer} | (config or {}), folder / "config.yaml")
    ledger = Ledger(folder / "ledger.jsonl")
    ledger.begin(plan.description())
    drawn = dict.fromkeys(sources, 0)
    lines = [{"step": 0, "time": START_TIME, "metrics": _validation(rng, sources, 0.0)}]
    granted = dict.fromkeys(sources, 0.0)
    for step in range(1, steps + 1):
        counts = plan.counts(step - 1)
        entries = [
            _entry(plan, step, source, drawn[source] + i)
            for source in sources
            for i in range(counts[source])
        ]
        for source in sources:
            drawn[source] += counts[source]
        ledger.append_step(step, entries, drawn)
        skill = step / max(steps, 1)
        metrics = _training(rng, counts, skill, granted)
        if step % test_freq == 0:
            metrics |= _validation(rng, sources, skill)
            metrics["timing_s/testing"] = rng.uniform(4, 8)
        lines.append({"step": step, "time": START_TIME + 6.0 * step, "metrics": metrics})
    write_lines(folder / "metrics.jsonl", lines)
    if total is None:
        (folder / "done").write_text(f"{steps}\n")
    return lines


def _entry(plan: MixturePlan, step: int, source: str, draw: int) -> LedgerEntry:
    row = int(plan.rows(source, [draw])[0])
    return LedgerEntry(
        step=step,
        source=source,
        draw=draw,
        row=row,
        row_id=f"{source}:{row:016x}",
        outcome="trained",
        trajectories=8,
        reward_mean=0.5,
    )


def _validation(rng: random.Random, sources: Sequence[str], skill: float) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for source in sources:
        solved = round(100 * min(1.0, 0.3 + 0.4 * skill + rng.uniform(-0.05, 0.05)))
        metrics[f"mixed/{source}/val/reward/mean"] = solved / 100
        metrics[f"mixed/{source}/val/pass_rate"] = solved / 100
        metrics[f"mixed/{source}/val/count"] = 100.0
        metrics[f"mixed/{source}/val/infra_error_rate"] = 0.0
    return metrics


def _training(
    rng: random.Random, counts: dict[str, int], skill: float, granted: dict[str, float]
) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for source, count in counts.items():
        granted[source] += rng.randrange(20, 90)
        metrics |= {
            f"mixed/{source}/{name}": value
            for name, value in _of_source(rng, source, count, skill, granted[source]).items()
        }
    for tool in sorted({TOOLS.get(source, "code") for source in counts}):
        metrics |= {f"mixed/tools/{tool}/{name}": value for name, value in _of_tool(rng).items()}
    phases = {
        "gen": rng.uniform(2, 3),
        "old_log_prob": rng.uniform(0.8, 1),
        "adv": 0.07,
        "update_actor": rng.uniform(1.8, 2.3),
        "update_weights": 0.03,
    }
    return metrics | {
        "mixed/ratio_error/max": 0.0,
        "mixed/ratio_error/cumulative_max": 0.0,
        "mixed/state_masking": 1.0,
        "mixed/limiter/granted": sum(granted.values()),
        "mixed/limiter/waiting": float(rng.randrange(3)),
        "mixed/limiter/waited_s": rng.random(),
        "mixed/limiter/utilisation": rng.random(),
        "mixed/limiter/rate_factor": 1.0,
        "actor/grad_norm": rng.lognormvariate(0, 0.4),
        "actor/entropy": 0.5 - 0.3 * skill + rng.uniform(-0.02, 0.02),
        "actor/ppo_kl": rng.uniform(-1e-4, 1e-4),
        "actor/kl_loss": rng.uniform(0, 0.01),
        "critic/score/min": 0.0,
        "critic/score/max": 1.0,
        "perf/throughput": rng.uniform(1500, 1900),
        **{f"timing_s/{phase}": seconds for phase, seconds in phases.items()},
        "timing_s/step": sum(phases.values()) + 0.1,
    }


def _of_source(
    rng: random.Random, source: str, count: int, skill: float, granted: float
) -> dict[str, float]:
    reward = min(1.0, max(0.0, 0.3 + 0.4 * skill + rng.gauss(0, 0.08)))
    tool = TOOLS.get(source, "code")
    generate_s = rng.uniform(1, 2)
    return {
        "count": float(count),
        "reward/mean": reward,
        "reward/std": 0.45,
        "reward/ci95": rng.uniform(0.1, 0.2),
        "pass_rate": reward,
        "reward_parts/acc": reward,
        "reward_parts/format": rng.uniform(0.9, 1),
        "solved_all": skill / 4,
        "solved_none": (1 - skill) / 4,
        "zero_variance": 0.25,
        "too_small": 0.0,
        "advantage_share": 1 / 3,
        "gradient_token_share": 1 / 3,
        "turns/mean": rng.uniform(1.5, 2.5),
        "prompt_length/mean": rng.uniform(40, 60),
        "response_length/mean": rng.uniform(100, 200),
        "response_length/max": rng.uniform(300, 400),
        "masked_fraction": rng.uniform(0.2, 0.4),
        "truncated_rate": rng.uniform(0, 0.05),
        "deadline_rate": 0.0,
        "entropy/mean": 0.5 - 0.3 * skill,
        "kl/mean": 0.01 * skill,
        "infra_error_rate": 0.0,
        "loop_error_rate": 0.0,
        "tool_calls/mean": rng.uniform(0.5, 1.5),
        "tool_error_rate": rng.uniform(0, 0.1),
        "tool_latency_s/p50": rng.uniform(0.02, 0.05),
        "tool_latency_s/p95": rng.uniform(0.1, 0.4),
        "tool_cache_hit_rate": rng.random(),
        "limiter_wait_s/mean": rng.uniform(0, 0.05),
        "server_wait_s/sum": 0.0,
        "generate_s/mean": generate_s,
        "tools_s/mean": generate_s * 0.4,
        "limiter/granted": granted,
        "limiter/waited_s": granted / 100,
        "limiter/refused": 0.0,
        **{f"tools/{tool}/{name}": value for name, value in _of_tool(rng).items()},
    }


def _of_tool(rng: random.Random) -> dict[str, float]:
    return {
        "calls": float(rng.randrange(50, 150)),
        "error_rate": rng.choice([0.0, 0.02, 0.1]),
        "latency_s/p50": rng.uniform(0.02, 0.05),
        "latency_s/p95": rng.uniform(0.1, 0.4),
    }
