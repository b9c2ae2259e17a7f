"""The screen of a running run: a table that redraws itself on a terminal, plain lines elsewhere."""

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from typing_extensions import Self

from cluster.progress import (
    Line,
    clock,
    phase_times,
    seconds_left,
    series,
    sources_of,
    step_line,
    warnings_of,
)

STILL_WAITING_S = 30.0
"""Plain view: how long it may say nothing during start-up."""


class View(Protocol):
    """Shows lines of `metrics.jsonl` as they come."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *details: object) -> None: ...

    def update(self, lines: Sequence[Line], phase: str) -> None:
        """Show the state.

        Args:
            lines: the whole file so far.
            phase: where the start-up is; shown until the first step of this start.
        """
        ...


class PlainView:
    """One line a step, for logs and pipes.

    Args:
        total_steps: where the run ends.
        seen: highest step that was trained before this start.
        write: takes one line.
        clock_s: seconds, monotonic.
    """

    def __init__(
        self,
        total_steps: int,
        seen: int,
        write: Callable[[str], Any] = print,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._seen, self._write, self._clock_s = total_steps, seen, write, clock_s
        self._shown = set(range(seen + 1)) if seen else set[int]()
        self._phase, self._began_s = "", clock_s()
        self._spoke_s = self._began_s

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None: ...

    def update(self, lines: Sequence[Line], phase: str) -> None:
        """Print the steps that were not printed yet."""
        steps = {line["step"] for line in lines}
        self._shown &= steps  # a resumed trainer takes steps after its checkpoint back
        fresh = [number for number, line in enumerate(lines) if line["step"] not in self._shown]
        for number in fresh:
            self._write(step_line(lines[: number + 1], self._total))
            self._shown.add(lines[number]["step"])
        now_s = self._clock_s()
        starting = not any(step > self._seen for step in steps)
        if fresh:
            self._spoke_s = now_s
        elif starting and (phase != self._phase or now_s - self._spoke_s >= STILL_WAITING_S):
            self._write(f"{phase} ({clock(now_s - self._began_s)})")
            self._phase, self._spoke_s = phase, now_s


class TableView:
    """A table that redraws itself.

    Args:
        total_steps: where the run ends.
        console: the terminal.
    """

    def __init__(self, total_steps: int, console: Console) -> None:
        self._total = total_steps
        self._live = Live(console=console, refresh_per_second=4)
        self._began_s = time.monotonic()

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._live.stop()

    def update(self, lines: Sequence[Line], phase: str) -> None:
        """Redraw."""
        elapsed = clock(time.monotonic() - self._began_s)
        self._live.update(state_table(lines, self._total, f"{phase} ({elapsed})"))


def state_table(lines: Sequence[Line], total_steps: int, phase: str = "") -> Group:
    """The state of a run: where it is, every source, the time of the phases."""
    step = max((line["step"] for line in lines), default=0)
    trained = [line for line in lines if line["step"] > 0]
    head = f"step {step}/{total_steps}"
    if trained:
        head += f"   left {clock(seconds_left(lines, total_steps))}"
    elif phase:
        head += f"   {phase}"
    table = Table("source", title_justify="left", pad_edge=False)
    columns = {
        "reward": "reward/mean",
        "prompts": "count",
        "solved": "pass_rate",
        "turns": "turns/mean",
        "tokens": "response_length/mean",
        "tool calls": "tool_calls/mean",
        "tool errors": "tool_error_rate",
        "validation first": "",
        "last": "",
    }
    for name in columns:
        table.add_column(name, justify="right")
    newest = lines[-1]["metrics"] if lines else {}
    for source in sources_of(lines):
        cells = [
            f"{newest[f'mixed/{source}/{name}']:.2f}" if f"mixed/{source}/{name}" in newest else "-"
            for name in columns.values()
            if name
        ]
        validation = series(lines, f"mixed/{source}/val/reward/mean")
        ends = [validation[0], validation[-1]] if validation else []
        cells += [f"{value:.2f} @{at}" for at, value in ends] or ["-", "-"]
        table.add_row(source, *cells)
    parts: list[Any] = [head]
    if table.row_count:
        parts.append(table)
    times = sorted(phase_times(newest).items(), key=lambda item: -item[1])[:6]
    if times:
        parts.append("seconds   " + "   ".join(f"{name} {value:.1f}" for name, value in times))
    if "mixed/ratio_error/max" in newest:
        parts.append(
            f"ratio error   this step {newest['mixed/ratio_error/max']:.0f}"
            f"   cumulative {newest.get('mixed/ratio_error/cumulative_max', 0):.0f} prompts"
        )
    parts += [f"warning   {warning}" for warning in warnings_of(lines)]
    return Group(*parts)
