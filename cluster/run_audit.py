"""What a run promises, proven from its files: the ledger against the plan, every mask bit."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_loop.mask_audit import MaskReport, audit_masks
from cluster.compose import at, files_at
from cluster.run_state import RunFolder
from config.schema import MixedConfig, load_section
from samplers.ledger import AuditReport, audit, read_ledger
from samplers.mixture_plan import MixturePlan
from samplers.rows import read_sources

SHOWN = 10
"""Mask problems that are spelled out."""


def plan_of(config: Mapping[str, Any], sizes: Mapping[str, int] | None = None) -> MixturePlan:
    """The mixture plan that the trainer of this config follows.

    Args:
        config: the resolved run config.
        sizes: source -> rows; None counts them in the training files.

    Raises:
        ValueError: the files cannot be read, or the mixture is impossible.
    """
    mixed = load_section(MixedConfig, at(config, "mixed", {}), "mixed")
    if sizes is None:
        sizes = rows_of(files_at(config, "data.train_files"))
    return MixturePlan(
        sizes={name: rows for name, rows in sizes.items() if name in mixed.ratios},
        ratios=mixed.ratios,
        batch_size=at(config, "data.train_batch_size"),
        seed=mixed.seed,
        apportionment=mixed.apportionment,
    )


def rows_of(files: Sequence[str]) -> dict[str, int]:
    """source -> rows over all files."""
    rows: Counter[str] = Counter()
    for file in read_sources(files):
        rows.update(file.rows_by_source)
    return dict(rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAudit:
    """Both proofs of one run."""

    mixture: AuditReport
    masks: MaskReport

    @property
    def ok(self) -> bool:
        """True when nothing is wrong."""
        return self.mixture.ok and self.masks.ok


def audit_run(folder: RunFolder, config: Mapping[str, Any]) -> RunAudit:
    """Hold the ledger of a run against its plan, and its masks against what the engine returned.

    Raises:
        ValueError: the ledger or the training files cannot be read.
    """
    return RunAudit(
        mixture=audit(read_ledger(folder.ledger), plan_of(config)), masks=audit_masks(folder.path)
    )


def describe(report: RunAudit) -> list[str]:
    """The report in lines."""
    mixture, masks = report.mixture, report.masks
    prompts = ", ".join(f"{source} {count}" for source, count in mixture.trained.items())
    verdict = "every batch as planned, nothing skipped, nothing twice"
    if not mixture.ok:
        verdict = "NOT as planned"
    return [
        f"ratio audit: {mixture.steps} steps, trained prompts {prompts}: {verdict}",
        *mixture.problems,
        f"mask audit: {masks}",
        *masks.problems[:SHOWN],
    ]
