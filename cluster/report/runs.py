"""A run as the report takes it, read from its folder; a torn last line is left out."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.compose import flatten, load_config
from cluster.progress import Line, sources_of
from cluster.run_state import RunFolder
from cluster.summary import trained
from samplers.ledger import Line as LedgerLine
from samplers.ledger import read_ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run."""

    name: str
    lines: Sequence[Line]
    """Of `metrics.jsonl`."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Dotted key -> value."""
    ledger: Sequence[LedgerLine] = ()
    ledger_problem: str = ""
    """Why the ledger could not be read; the metrics speak for the mixture then."""
    ended: bool = False
    """Whether the trainer ended by itself after all steps."""

    @property
    def trained(self) -> list[Line]:
        """Lines of optimizer steps."""
        return trained(self.lines)

    @property
    def sources(self) -> list[str]:
        """Its sources, sorted."""
        return sources_of(self.lines)

    @property
    def status(self) -> str:
        """How far it is, in words."""
        total = self.config.get("trainer.total_training_steps", "?")
        if not self.lines:
            return f"0 of {total} steps: no metrics yet"
        last = max(line["step"] for line in self.lines)
        when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(self.lines[-1]["time"]))
        state = "finished" if self.ended else "not finished"
        return f"{last} of {total} steps, {state}, last metrics {when}"


def load_run(folder: RunFolder, name: str | None = None) -> Run:
    """The run of a folder, as far as it is.

    Args:
        folder: with a `config.yaml`.
        name: shown; None takes the folder's.

    Raises:
        ConfigError: it is no run's folder.
        ValueError: a line of `metrics.jsonl` before the last is none.
    """
    config = flatten(load_config(folder.config))
    try:
        ledger, problem = read_ledger(folder.ledger), ""
    except ValueError as error:
        ledger, problem = [], str(error)
    total = config.get("trainer.total_training_steps")
    return Run(
        name=name or folder.path.resolve().name,
        lines=folder.lines(),
        config=config,
        ledger=ledger,
        ledger_problem=problem,
        ended=isinstance(total, int) and folder.is_done(total),
    )
