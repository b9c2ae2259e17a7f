"""The screen of a run that goes on: redrawn on a terminal, plain lines elsewhere."""

import time
from bisect import bisect_left
from collections.abc import Callable
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.text import Text
from typing_extensions import Self

from verl_mixed.run.text import clock, passed_over_words, printable
from verl_mixed.views.progress import step_line
from verl_mixed.views.watch.run_reader import RunReader, State
from verl_mixed.views.watch.screen import screen

STILL_WAITING_S = 30.0
"""Plain view: how long it may say nothing during start-up."""

_OF_A_PACE = 11
"""Newest lines that a step's line is made of, besides the first and the newest validation."""


class View(Protocol):
    """Shows what a reader has read."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *details: object) -> None: ...

    def update(self, state: State) -> None:
        """Show where the run is.

        Args:
            state: the reader's, now.
        """
        ...


def view_on(console: Console, reader: RunReader, seen: int) -> View:
    """The view of a run that this process runs.

    Args:
        console: a terminal or not.
        reader: of the run.
        seen: highest step that was trained before this start.
    """
    if is_redrawn(console):
        return TableView(reader, console)
    return PlainView(reader, lambda line: console.print(line, markup=False), seen=seen)


def is_redrawn(console: Console) -> bool:
    """Whether what is on it can be drawn over."""
    return console.is_terminal and not console.is_dumb_terminal


class PlainView:
    """One line a step, for logs and pipes.

    Args:
        reader: of the run.
        write: takes one line.
        seen: highest step that was trained before this start; those are not printed.
        with_state: say who runs it and how it ended, too.
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
        """Print what was not printed yet."""
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
        if self._with_state and state.words != self._state:
            self._write(printable(state.words))
            self._state = state.words

    def _write_steps(self) -> None:
        lines, total_steps = self._reader.lines, self._reader.total_steps
        self._shown &= {line["step"] for line in lines}  # a resume takes steps back
        validated = [
            number
            for number, line in enumerate(lines)
            if any("/val/" in name for name in line["metrics"])
        ]
        for number, line in enumerate(lines):
            if line["step"] in self._shown:
                continue
            first = max(0, number + 1 - _OF_A_PACE)
            before = bisect_left(validated, first) - 1
            ends = sorted({validated[0], validated[before]}) if before >= 0 else []
            context = [lines[end] for end in ends]
            self._write(step_line([*context, *lines[first : number + 1]], total_steps))
            self._shown.add(line["step"])
            self._spoke_s = self._clock_s()


class TableView:
    """A screen that redraws itself.

    Args:
        reader: of the run.
        console: the terminal.
        whole: take the terminal's whole screen, name the run and its state there, and give the
            terminal back as it was.
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
        """Redraw."""
        spare = 0 if self._whole else 2
        drawn = drawing(self._reader, state, self._console, titled=self._whole, spare=spare)
        self._live.update(drawn, refresh=True)


def drawing(
    reader: RunReader, state: State, console: Console, *, titled: bool = True, spare: int = 0
) -> Text:
    """A run as it is now.

    Args:
        reader: of the run.
        state: the reader's, now.
        console: where it is to be shown.
        titled: name the run and its state.
        spare: lines of the terminal to leave.
    """
    width, height = console.size
    sight = reader.sight(state, titled=titled)
    return screen(sight, width, height - spare, ascii_only=console.options.ascii_only)
