"""The screen of a run as lines of text that fit a terminal. Pure: it reads no file and no clock.

On a narrow terminal the least important columns are left out, on a low one the least important
lines. Control characters in text from a run are removed, and its markup is shown as text.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from rate_limit.snapshot import Snapshot
from samplers.apportionment import apportion
from verl_mixed.run.text import clock, printable
from verl_mixed.views.estimates import Improvement
from verl_mixed.views.summary import AFTER_STEP, AVERAGE_OVER, PHASE_WORDS
from verl_mixed.views.watch.board import Board, means_of
from verl_mixed.views.watch.columns import Column, Pane, column, cut, fitting, table
from verl_mixed.views.watch.tails import LogWarning, StuckTrajectory

LEAST_WIDTH, LEAST_HEIGHT = 20, 3

_BLOCKS = "▁▂▃▄▅▆▇█"
_MARKS = "_.:-=+*#"
_LEAST_SPARKS, _MOST_SPARKS = 8, 40
_MOST_NAME = 20
_WIDE = 60
_MOST_STUCK = 3
_PHASE_STYLES = (
    "black on cyan",
    "black on yellow",
    "black on green",
    "black on magenta",
    "reverse",
)
_VERDICT_STYLES = {"improved": "green", "got worse": "red"}
_LEVEL_STYLES = {"WARNING": "yellow"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScreenContent:
    """What the screen shows at one moment."""

    board: Board
    total_steps: int | None
    now: float
    """Seconds since 1970."""

    title: str = ""
    """The run's name and its state; empty: no such line."""

    style: str = "bold"
    start_up: str = ""
    """The phase of the start-up; empty once it is over."""

    is_over: bool = False
    """Whether no process runs the run."""

    limiter: Snapshot | None = None
    """The limiter now; None: show the newest step's."""

    stuck: Sequence[StuckTrajectory] = field(default_factory=list[StuckTrajectory])
    log_warnings: Sequence[LogWarning] = field(default_factory=list[LogWarning])
    """Warnings of the log, the newest last."""


def screen(content: ScreenContent, width: int, height: int, *, ascii_only: bool = False) -> Text:
    """The screen: at most `height` lines of at most `width` cells.

    `ascii_only` says that the terminal's encoding has only ASCII characters.
    """
    width, height = max(width, LEAST_WIDTH), max(height, LEAST_HEIGHT)
    lines = fitting(_Drawing(content, width, ascii_only).panes(), height)
    for line in lines:
        line.no_wrap = True
        line.truncate(width, overflow="crop" if ascii_only else "ellipsis")
    return Text("\n", no_wrap=True).join(lines)


def _number(value: float | None, form: str = ".2f") -> Text:
    return Text("-" if value is None else format(value, form))


def _change(improvement: Improvement | None) -> Text:
    if improvement is None:
        return Text("-")
    measure = _MEASURE_NAMES[improvement.measure]
    style = _VERDICT_STYLES.get(improvement.verdict, "")
    return Text(f"{measure}{improvement.change:+.2f}", style=style)


_MEASURE_NAMES = {
    "validation reward": "",
    "validation pass rate": "solved ",
    "training reward": "train ",
}


class _Drawing:
    """The panes of one screen."""

    def __init__(self, content: ScreenContent, width: int, ascii_only: bool) -> None:
        self._content, self._width, self._ascii = content, width, ascii_only
        self._board = content.board

    def panes(self) -> list[Pane]:
        return [
            Pane(lines=self._title(), importance=90),
            Pane(lines=[self._progress()], importance=100),
            Pane(lines=self._sources(), importance=80, least=3),
            Pane(lines=self._ratio(), importance=60),
            Pane(lines=self._phases(), importance=40),
            Pane(lines=self._limiter(), importance=50),
            Pane(lines=self._tools(), importance=20, least=2),
            Pane(lines=self._stuck(), importance=70),
            Pane(lines=self._listed("warning", self._board.warnings), importance=75),
            Pane(lines=self._log_warnings(), importance=30),
        ]

    def _text(self, text: str) -> str:
        return printable(text, ascii_only=self._ascii)

    def _name(self, text: str) -> str:
        text = self._text(text)
        return text if cell_len(text) <= _MOST_NAME else set_cell_size(text, _MOST_NAME - 1) + "~"

    def _titled(self, title: str, rest: str, style: str = "") -> Text:
        return Text.assemble((f"{title:<13}", "dim"), (rest, style))

    def _listed(self, title: str, texts: Sequence[str]) -> list[Text]:
        """A line for each text; the first line has the title."""
        return [
            self._titled("" if number else title, self._text(text), "yellow")
            for number, text in enumerate(texts)
        ]

    def _title(self) -> list[Text]:
        title = self._text(self._content.title)
        return [Text(title, style=self._content.style)] if title else []

    def _progress(self) -> Text:
        board, content = self._board, self._content
        total = content.total_steps
        parts = [f"step {board.step}/{'?' if total is None else total}"]
        if total and self._width >= _WIDE:
            parts.append(self._bar(board.step / total, 20))
        if content.start_up:
            parts.append(self._text(content.start_up))
        elif board.left_s and not content.is_over:
            parts.append(f"left {clock(board.left_s)}")
        if board.time is not None and not content.start_up:
            parts.append(f"last step {clock(max(0.0, content.now - board.time))} ago")
        return Text("  ".join(parts), style="bold")

    def _bar(self, share: float, width: int) -> str:
        full, empty = ("#", "-") if self._ascii else ("█", "░")
        filled = round(min(1.0, max(0.0, share)) * width)
        return full * filled + empty * (width - filled)

    def _sources(self) -> list[Text]:
        rows = self._board.sources
        if not rows:
            return []
        is_validated = all(
            row.improvement is None or row.improvement.measure != "training reward" for row in rows
        )
        longest = max(_LEAST_SPARKS, *(len(row.rewards) for row in rows))
        sparks = Column(
            title="reward",
            importance=70,
            draw=lambda width: [self._sparks(row.rewards, width) for row in rows],
            least=_LEAST_SPARKS,
            most=min(_MOST_SPARKS, longest),
            align="left",
        )
        columns = [
            column("source", 100, [Text(self._name(row.source)) for row in rows], "left"),
            sparks,
            column("last", 90, [_number(row.latest) for row in rows]),
            column(f"mean of {AVERAGE_OVER}", 60, [_number(row.recent) for row in rows]),
            column(
                "since 1st val" if is_validated else "change",
                80,
                [_change(row.improvement) for row in rows],
            ),
            column("val", 40, [_number(row.validation) for row in rows]),
            column("prompts", 50, [_number(row.count, ".0f") for row in rows]),
            column("solved", 30, [_number(row.pass_rate, ".0%") for row in rows]),
        ]
        return table(columns, self._width)

    def _sparks(self, points: Sequence[tuple[int, float]], width: int) -> Text:
        """A curve: a character for each span of equally many steps, scaled to the curve's range."""
        marks = _MARKS if self._ascii else _BLOCKS
        values = [value for _, value in means_of(points, width)]
        low, high = min(values, default=0.0), max(values, default=0.0)
        if high <= low:
            return Text(marks[len(marks) // 2] * len(values), style="cyan")
        top = len(marks) - 1
        drawn = (marks[round((value - low) / (high - low) * top)] for value in values)
        return Text("".join(drawn), style="cyan")

    def _ratio(self) -> list[Text]:
        if self._board.ratio_error is None:
            return []
        step, cumulative = self._board.ratio_error
        text = f"{step:.0f} prompts this step, {cumulative:.0f} cumulative"
        return [self._titled("ratio error", text, "red" if step or cumulative else "")]

    def _phases(self) -> list[Text]:
        times = {name: s for name, s in self._board.phases.items() if s > 0}
        limits = self._board.limits
        after_s = times.pop(AFTER_STEP, 0.0) if limits else 0.0
        if not times:
            return []
        whole = sum(Fraction(seconds) for seconds in times.values())
        shares = {name: Fraction(seconds) / whole for name, seconds in times.items()}
        bar = Text()
        cells = apportion(shares, self._width)
        for number, (name, width) in enumerate(cells.items()):
            label = f"|{self._phase(name)} {times[name]:.1f}"
            bar.append(
                set_cell_size(label, width), style=_PHASE_STYLES[number % len(_PHASE_STYLES)]
            )
        order = sorted(times.items(), key=lambda item: -item[1])
        parts = []
        if limits is not None:
            parts.append(f"slowest {self._phase(limits.phase)} {limits.phase_s:.1f} s")
            if after_s:
                parts.append(f"{self._phase(AFTER_STEP)} +{after_s:.1f} s")
            if limits.tool_share is not None and limits.limiter_share is not None:
                parts.append(
                    f"rollouts: tools {limits.tool_share:.0%}, limiter {limits.limiter_share:.0%}"
                )
            order = [(name, seconds) for name, seconds in order if name != limits.phase]
        parts.append(", ".join(f"{self._phase(name)} {s:.1f}" for name, s in order if s >= 0.05))
        title = f"step {limits.step_s:.1f} s" if limits else "seconds"
        return [bar, self._titled(title, "; ".join(filter(None, parts)))]

    def _phase(self, name: str) -> str:
        return self._text(PHASE_WORDS.get(name, name))

    def _limiter(self) -> list[Text]:
        now = self._content.limiter
        row = now or self._board.limiter
        if row is None:
            return []
        rate = f" of {now.per_minute:,.0f}/min" if now else ""
        paused_s = now.paused_s if now else 0.0
        parts = [
            f"{self._bar(row.utilisation, 10)} {row.utilisation:.0%}{rate}",
            f"granted {row.granted:,.0f}",
            f"waiting {row.waiting:,.0f}",
        ]
        if row.rate_factor < 1:
            parts.append(f"slowed down to {row.rate_factor:.0%}")
        if paused_s > 0:
            parts.append(f"paused for {clock(paused_s)}")
        if now is None:
            parts.append("at the last step")
        is_bad = row.rate_factor < 1 or paused_s > 0
        return [self._titled("limiter", "  ".join(parts), "yellow" if is_bad else "")]

    def _tools(self) -> list[Text]:
        rows = self._board.tools
        if not rows:
            return []
        columns = [
            column("tool", 100, [Text(self._name(row.tool).ljust(11)) for row in rows], "left"),
            column("calls", 60, [Text(f"{row.calls}") for row in rows]),
            column("p50 s", 70, [_number(row.p50_s) for row in rows]),
            column("p95 s", 80, [_number(row.p95_s) for row in rows]),
            column("errors", 90, [_number(row.error_rate, ".1%") for row in rows]),
        ]
        return table(columns, self._width)

    def _stuck(self) -> list[Text]:
        now = self._content.now
        longest = sorted(self._content.stuck, key=lambda each: each.waited_s, reverse=True)
        lines = self._listed("stuck", [each.describe(now) for each in longest])
        return lines if len(lines) <= _MOST_STUCK else cut(lines, _MOST_STUCK + 1)

    def _log_warnings(self) -> list[Text]:
        lines = []
        for warning in reversed(self._content.log_warnings):  # the newest is cut last
            times = f"{warning.count:,} times: " if warning.count > 1 else ""
            lines.append(
                self._titled(
                    f"log {warning.level.lower()}",
                    times + self._text(warning.text),
                    _LEVEL_STYLES.get(warning.level, "red"),
                )
            )
        return lines
