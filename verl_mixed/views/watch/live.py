"""The live view of a run: a redrawn screen on a terminal, a line for each step elsewhere."""

import time
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text
from typing_extensions import Self

from verl_mixed.run.text import clock, passed_over_words, printable
from verl_mixed.views.progress import step_line
from verl_mixed.views.watch.run_reader import RunReader, State
from verl_mixed.views.watch.screen import screen

STILL_WAITING_S = 30.0
"""Seconds without a line, during start-up, after which the plain view repeats the phase."""

_PACE_LINES = 11
"""Newest lines that a step's line is computed from: `seconds_left` takes the last ten steps. The
first and the newest validation are added."""


class PlainView:
    """One line a step, for logs and pipes.

    Args:
        reader: of the run.
        write: prints one line.
        seen: highest step that was trained before this start; steps up to it are not printed.
        with_state: also print which process runs the run, and how the run ended.
        clock_s: seconds, monotonic.
    """

    def __init__(
        self,
        reader: RunReader,
        write: Callable[[str], Any] = print,
        *,
        seen: int = 0,
        with_state: bool = False,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reader, self._write, self._clock_s = reader, write, clock_s
        self._with_state = with_state
        self._shown = set(range(seen + 1)) if seen else set[int]()
        self._newest: object = None
        self._passed_over = 0
        self._start_up, self._state = "", ""
        self._spoke_s = clock_s()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None: ...

    def update(self, state: State) -> None:
        """Print steps, warnings and states that were not printed yet."""
        lines = self._reader.lines
        newest = (len(lines), lines[-1]["step"], lines[-1]["time"]) if lines else None
        if newest != self._newest:
            self._newest = newest
            self._write_steps()
        if (passed_over := self._reader.passed_over) != self._passed_over:
            self._passed_over = passed_over
            if passed_over:
                self._write(f"WARNING {passed_over_words(passed_over)}")
        now_s = self._clock_s()
        is_news = state.start_up != self._start_up or now_s - self._spoke_s >= STILL_WAITING_S
        if state.start_up and is_news:
            self._write(f"{state.start_up} ({clock(state.started_s)})")
            self._start_up, self._spoke_s = state.start_up, now_s
        if self._with_state and state.text != self._state:
            self._write(printable(state.text))
            self._state = state.text

    def _write_steps(self) -> None:
        lines, total_steps = self._reader.lines, self._reader.total_steps
        self._shown &= {line["step"] for line in lines}  # a resume removes steps from the file
        validated = [
            number
            for number, line in enumerate(lines)
            if any("/val/" in name for name in line["metrics"])
        ]
        for number, line in enumerate(lines):
            if line["step"] in self._shown:
                continue
            first = max(0, number + 1 - _PACE_LINES)
            before = bisect_left(validated, first) - 1
            ends = sorted({validated[0], validated[before]}) if before >= 0 else []
            context = [lines[end] for end in ends]
            self._write(step_line([*context, *lines[first : number + 1]], total_steps))
            self._shown.add(line["step"])
            self._spoke_s = self._clock_s()


class TableView:
    """A screen that redraws itself.

    With `whole`, it uses the whole terminal, has a line for the run's name and state, and restores
    the terminal's content at the end.
    """

    def __init__(self, reader: RunReader, console: Console, *, whole: bool = False) -> None:
        self._reader, self._console, self._whole = reader, console, whole
        self._live = Live(console=console, auto_refresh=False, screen=whole)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._live.stop()

    def update(self, state: State) -> None:
        """Draw the run in this state."""
        drawn = drawing(self._reader, state, self._console, whole=self._whole)
        self._live.update(drawn, refresh=True)


View = PlainView | TableView


def view_on(console: Console, reader: RunReader, seen: int) -> View:
    """The view of a run that this process runs; `seen` is the last step before this start."""
    if is_redrawn(console):
        return TableView(reader, console)
    return PlainView(reader, lambda line: console.print(line, markup=False), seen=seen)


def is_redrawn(console: Console) -> bool:
    """Whether the console is a terminal whose lines can be overwritten."""
    return console.is_terminal and not console.is_dumb_terminal


def drawing(reader: RunReader, state: State, console: Console, *, whole: bool = True) -> Text:
    """The screen of a run; not `whole`: without name and state, and two lines stay free."""
    width, height = console.size
    content = reader.screen_content(state, titled=whole)
    spare = 0 if whole else 2
    return screen(content, width, height - spare, ascii_only=console.options.ascii_only)
