"""Audit a run from its files: the ledger against the plan, every mask bit against the engine.

The checkpoint folder of a recipe of verl's has a ledger only, which holds its plan.
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from agent_loop.records.mask_audit import MaskReport, audit_masks
from agent_loop.records.run_folder import read_metrics
from config.lookup import at, files_at
from config.schema import MixedConfig, load_section
from config.text_table import text_table
from samplers.adaptive.curriculum import ChosenRows
from samplers.adaptive.profiles import choices_for, row_ids_of
from samplers.audit import AuditReport, audit, drew_ahead, plans_in
from samplers.ledger import LedgerEntry, Line, Outcome, StepEnd, read_ledger
from samplers.mixture_plan import MixturePlan
from samplers.planned import plan_for
from samplers.rows.schema import read_sources
from verl_mixed.run.state import RunFolder
from verl_mixed.run.text import passed_over_words, printable, retention_words

SHOWN = 10
"""Most mask problems that are printed."""


def plan_of(
    config: Mapping[str, Any],
    sizes: Mapping[str, int] | None = None,
    run: Path | None = None,
) -> MixturePlan:
    """The mixture plan that the trainer follows.

    Args:
        sizes: source -> rows; None counts the rows of the training files.
        run: the folder of the run that trained by the plan; None: a start is planned.

    Raises:
        ValueError: the files cannot be read, or the mixture is impossible.
    """
    mixed = load_section(MixedConfig, at(config, "mixed", {}), "mixed")
    files = files_at(config, "data.train_files")
    if sizes is None:
        sizes = rows_of(files)
    are_there = all(sizes.values()) and all(os.path.exists(file) for file in files)
    choices: dict[str, ChosenRows] = {}
    if are_there:
        afresh = run is None and at(config, "trainer.resume_mode") == "disable"
        choices = choices_for(mixed.sources, files, run or mixed.run_dir, afresh=afresh)
    batch_size, rollout_n = (
        at(config, key) for key in ("data.train_batch_size", "actor_rollout_ref.rollout.n")
    )
    return plan_for(mixed, sizes, batch_size, rollout_n, choices)


def rows_of(files: Sequence[str]) -> dict[str, int]:
    """source -> number of rows in all files."""
    rows: Counter[str] = Counter()
    for file in read_sources(files):
        rows.update(file.rows_by_source)
    return dict(rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAudit:
    """The audit of a run's mixture and of its masks."""

    mixture: AuditReport
    masks: MaskReport
    passed_over: int = 0
    """Complete lines of `metrics.jsonl` that are not valid."""

    coverage: str = ""
    """Which trained trajectories have no file, so that their masks are not checked; empty if all
    have one."""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return self.mixture.ok and self.masks.ok and not self.passed_over


def audit_run(folder: RunFolder, config: Mapping[str, Any]) -> RunAudit:
    """Compare the ledger with the plan, and the masks with the tokens that the engine returned.

    Raises:
        ValueError: there is no ledger, or it or the training files cannot be read.
    """
    if not folder.ledger.exists():
        raise ValueError(f"no {folder.ledger}: the run has trained no step, or lost its ledger")
    over = folder.is_done(int(at(config, "trainer.total_training_steps", 0)))
    lines = read_ledger(folder.ledger)
    mixture = audit(
        lines,
        plan_of(config, run=folder.path),
        in_flight="async" in str(at(config, "trainer.v1.trainer_mode")) and not over,
        row_ids=row_ids_of(files_at(config, "data.train_files")),
    )
    _, passed_over = read_metrics(folder.metrics)
    masks = audit_masks(folder.path)
    return RunAudit(
        mixture=mixture,
        masks=masks,
        passed_over=passed_over,
        coverage=_coverage(lines, masks.by_step, config),
    )


def audit_recipe(folder: RunFolder) -> AuditReport:
    """Compare the ledger of a recipe of verl's with the plans in it.

    Raises:
        ValueError: the ledger cannot be read.
    """
    lines = read_ledger(folder.ledger)
    if not (plans := plans_in(lines)):
        raise ValueError(f"{folder.ledger} has no plan: give the folder of a run that has trained")
    last = max((line.step for line in lines if isinstance(line, StepEnd)), default=0)
    is_async = drew_ahead(lines) or any(folder.path.glob("global_step_*/transfer_queue"))
    is_over = any(
        line.step == last and line.outcome == "unfinished"
        for line in lines
        if isinstance(line, LedgerEntry)
    )
    return audit(lines, plans[-1][1], in_flight=is_async and not is_over)


def _coverage(lines: Sequence[Line], by_step: Counter[int], config: Mapping[str, Any]) -> str:
    """The text of `RunAudit.coverage`."""
    trained = Counter[int]()
    for line in lines:
        if isinstance(line, LedgerEntry):
            trained[line.step] += line.trajectories
    seen = trained.keys() & by_step.keys()
    written = sum(by_step[step] for step in seen)
    if written >= trained.total():
        return ""
    which = f" (steps {min(seen)} to {max(seen)})" if seen else ""
    return (
        f"  of {trained.total()} trained trajectories {written} are in trajectories/, of "
        f"{len(seen)} of {len(trained)} steps{which}; the others are not checked: "
        f"{retention_words(config) or 'no setting of the run removes them'}"
    )


def describe(report: RunAudit) -> list[str]:
    """The audit as printable lines: verdict, table of sources, problems with the worst first."""
    masks = report.masks
    lines = [
        f"mask audit: {masks}",
        *([report.coverage] if report.coverage else []),
        *([_absent_words(masks.absent)] if masks.model_tokens and masks.absent else []),
        *masks.problems[:SHOWN],
    ]
    if report.passed_over:
        lines.append(passed_over_words(report.passed_over))
    return [*describe_mixture(report.mixture), *map(printable, lines)]


def _absent_words(absent: set[str]) -> str:
    names = ", ".join(sorted(absent))
    return f"  no record has {names}: older releases did not write these, and they are None"


def describe_mixture(mixture: AuditReport) -> list[str]:
    """The part of `describe` that the ledger alone gives."""
    verdict = "every batch as planned, nothing skipped, nothing twice"
    if not mixture.ok:
        verdict = f"NOT as planned: {mixture.problems[0]}"
    lines = [
        f"ratio audit: {mixture.steps} steps, trained prompts "
        f"{', '.join(f'{name} {count}' for name, count in mixture.trained.items())}: {verdict}",
        f"  worst batch off by {mixture.worst_batch} prompts, the run so far by "
        f"{mixture.cumulative_error:.3g}",
        *_table(mixture),
        *mixture.problems[1:],
    ]
    return [printable(line) for line in lines]


def _table(mixture: AuditReport) -> list[str]:
    """A line per source: prompts that were due, and prompts by outcome."""
    heads = ("due", *get_args(Outcome)[:-1], "open")
    rows = [["source", *heads]]
    for name, account in mixture.sources.items():
        unfinished = account.outcomes.get("unfinished", 0) + account.under_way
        counts = [account.outcomes.get(outcome, 0) for outcome in get_args(Outcome)[:-1]]
        rows.append([name, f"{account.due:.1f}", *map(str, counts), str(unfinished)])
    return [f"  {line}" for line in text_table(rows, numbers=True, least=(12, 8))]
