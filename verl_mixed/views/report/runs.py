"""A run as the report needs it, read from its folder. A last line that is cut off is left out."""

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from agent_loop.records.run_folder import read_metrics
from config.disk import plain_lines
from config.lookup import flatten
from samplers.ledger import Line as LedgerLine
from samplers.ledger import PlanStart, read_ledger
from samplers.mixture_plan import MixturePlan
from verl_mixed.run.compose import load_config
from verl_mixed.run.evaluations import summaries_of, validations_of
from verl_mixed.run.state import RunFolder
from verl_mixed.views.estimates import (
    NO_RECORDS,
    Improvement,
    Validated,
    improvements,
    not_comparable,
)
from verl_mixed.views.mixture_rows import RatioRow, ratio_rows
from verl_mixed.views.progress import Line, sources_of
from verl_mixed.views.summary import restarts_of, trained


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run."""

    name: str
    lines: Sequence[Line]
    """Of `metrics.jsonl`."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Dotted key -> value."""
    ledger: Sequence[LedgerLine] = ()
    ledger_problem: str = ""
    """Why the ledger could not be read; the mixture is then taken from the metrics."""
    passed_over: int = 0
    """Lines of `metrics.jsonl` that could not be read."""
    starts: Sequence[float] = ()
    """When it was started and resumed, seconds since 1970."""
    validated: Validated = field(default_factory=lambda: NO_RECORDS)
    """Records of the first and the last validation."""
    evaluations: Sequence[Mapping[str, Any]] = ()
    """Results of `verl-mixed evaluate`."""
    ended: bool = False
    """Whether the trainer ended by itself after all steps."""

    @cached_property
    def trained(self) -> list[Line]:
        """Lines of optimizer steps."""
        return trained(self.lines)

    @cached_property
    def timed(self) -> list[Line]:
        """Lines of optimizer steps that say how long they took."""
        return [line for line in self.trained if "timing_s/step" in line["metrics"]]

    @cached_property
    def improvements(self) -> list[Improvement]:
        """First and last reward of each source, and the change between them."""
        return improvements(self.lines, self.validated)

    @cached_property
    def not_comparable(self) -> dict[str, str]:
        """Source without an improvement -> why; empty before the first step."""
        return not_comparable(self.lines) if self.trained else {}

    @cached_property
    def sources(self) -> list[str]:
        """Its sources, sorted."""
        return sources_of(self.lines)

    @cached_property
    def mixture(self) -> list[RatioRow]:
        """Planned against trained prompts, step by step."""
        return ratio_rows(self.lines, self.ledger)

    @property
    def restarts(self) -> list[int]:
        """Steps that began with an empty limiter; none where the limiter outlives the run."""
        shared = any(
            value for key, value in self.config.items() if key.endswith(".rate_limit_file")
        )
        return [] if shared else restarts_of(self.lines, self.starts)

    @property
    def status(self) -> str:
        """Steps done, whether the run has finished, and the time of the last metrics."""
        total = self.config.get("trainer.total_training_steps", "?")
        if not self.lines:
            return f"0 of {total} steps: no metrics yet"
        last = max(line["step"] for line in self.lines)
        when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(self.lines[-1]["time"]))
        state = "finished" if self.ended else "not finished"
        return f"{last} of {total} steps, {state}, last metrics {when}"


def load_run(folder: RunFolder, name: str | None = None) -> Run:
    """Read a run, finished or not; its `name` is shown, or else that of the folder.

    Raises:
        ConfigError: it is no run's folder.
        OSError: one of its files cannot be read.
    """
    config = flatten(load_config(folder.config))
    lines, passed_over = read_metrics(folder.metrics)  # before the ledger: that has a step first
    try:
        ledger, problem = read_ledger(folder.ledger), ""
        for line in ledger:
            if isinstance(line, PlanStart):
                MixturePlan.from_description(line.plan)
    except ValueError as error:
        ledger, problem = [], str(error)
    total = config.get("trainer.total_training_steps")
    return Run(
        name=name or folder.path.resolve().name,
        lines=lines,
        config=config,
        ledger=ledger,
        ledger_problem=problem,
        passed_over=passed_over,
        starts=_starts(folder.versions),
        validated=validations_of(folder.path, lines),
        evaluations=summaries_of(folder.path),
        ended=isinstance(total, int) and folder.is_done(total),
    )


def _starts(versions: Path) -> list[float]:
    """Moments of `versions.jsonl`, which has a line for each start."""
    found = []
    for raw in plain_lines(versions) if versions.is_file() else []:
        with suppress(ValueError, TypeError, KeyError):
            when = datetime.strptime(json.loads(raw)["time"], "%Y-%m-%dT%H:%M:%S%z")
            found.append(when.timestamp())
    return found
