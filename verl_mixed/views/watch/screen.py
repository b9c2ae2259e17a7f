"""The screen of a run as lines of text that fit a terminal. Pure: what is shown comes in.

What a narrow terminal has no room for goes by importance: columns first, then sections from below.
Text from a run is made inert before it is shown, and no part of it is markup.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from samplers.apportionment import apportion
from verl_mixed.run.text import clock, passed_over_words, printable
from verl_mixed.views.estimates import Improvement
from verl_mixed.views.summary import AFTER_STEP, AVERAGE_OVER, PHASE_WORDS
from verl_mixed.views.watch.board import Board, LimiterRow, means_of
from verl_mixed.views.watch.columns import Column, Filler, Pane, cut, fitting, table
from verl_mixed.views.watch.tails import Stuck, Warned

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
class Sight:
    """All that is shown at one moment."""

    board: Board
    total_steps: int | None
    now: float
    """Seconds since 1970."""

    title: str = ""
    """The run and what is with it; empty leaves the line out."""

    style: str = "bold"
    start_up: str = ""
    """Where the start-up is, while it is."""

    is_over: bool = False
    """Nobody runs it."""

    limiter: LimiterRow | None = None
    """As it is now; None takes the newest step's."""

    stuck: Sequence[Stuck] = field(default_factory=list[Stuck])
    warned: Sequence[Warned] = field(default_factory=list[Warned])
    """From the log, the newest last."""

    passed_over: int = 0
    """Lines of `metrics.jsonl` that are none."""


def screen(sight: Sight, width: int, height: int, *, ascii_only: bool = False) -> Text:
    """The screen: at most `height` lines of at most `width` cells.

    Args:
        sight: what is shown.
        width: of the terminal.
        height: of the terminal.
        ascii_only: the terminal's encoding has no other characters.
    """
    width, height = max(width, LEAST_WIDTH), max(height, LEAST_HEIGHT)
    lines = fitting(_Drawing(sight, width, ascii_only).panes(), height)
    for line in lines:
        line.no_wrap = True
        line.truncate(width, overflow="crop" if ascii_only else "ellipsis")
    return Text("\n", no_wrap=True).join(lines)


def _number(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


def _change(improvement: Improvement | None) -> str:
    if improvement is None:
        return "-"
    words = f"{improvement.change:+.2f}"
    return _OF_MEASURE[improvement.measure] + words


_OF_MEASURE = {
    "validation reward": "",
    "validation pass rate": "solved ",
    "training reward": "train ",
}


class _Drawing:
    """One screen."""

    def __init__(self, sight: Sight, width: int, ascii_only: bool) -> None:
        self._sight, self._width, self._ascii = sight, width, ascii_only
        self._board = sight.board

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
            Pane(lines=self._run_warnings(), importance=75),
            Pane(lines=self._log_warnings(), importance=30),
        ]

    def _text(self, text: str) -> str:
        return printable(text, ascii_only=self._ascii)

    def _name(self, text: str) -> str:
        text = self._text(text)
        return text if cell_len(text) <= _MOST_NAME else set_cell_size(text, _MOST_NAME - 1) + "~"

    def _titled(self, title: str, rest: str, style: str = "") -> Text:
        return Text.assemble((f"{title:<13}", "dim"), (rest, style))

    def _title(self) -> list[Text]:
        title = self._text(self._sight.title)
        return [Text(title, style=self._sight.style)] if title else []

    def _progress(self) -> Text:
        board, total, sight = self._board, self._sight.total_steps, self._sight
        words = [f"step {board.step}/{'?' if total is None else total}"]
        if total and self._width >= _WIDE:
            words.append(self._bar(board.step / total, 20))
        if sight.start_up:
            words.append(self._text(sight.start_up))
        elif board.left_s and not sight.is_over:
            words.append(f"left {clock(board.left_s)}")
        if board.time is not None and not sight.start_up:
            words.append(f"last step {clock(max(0.0, sight.now - board.time))} ago")
        return Text("  ".join(words), style="bold")

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
        columns = [
            Column(
                title="source",
                cells=[self._name(row.source) for row in rows],
                importance=100,
                is_text=True,
            ),
            Filler(
                title="reward",
                draw=lambda row, width: self._sparks(rows[row].rewards, width),
                importance=70,
                least=_LEAST_SPARKS,
                most=min(_MOST_SPARKS, max(_LEAST_SPARKS, *(len(row.rewards) for row in rows))),
                style="cyan",
            ),
            Column(
                title="last",
                cells=[_number(row.recent.latest if row.recent else None) for row in rows],
                importance=90,
            ),
            Column(
                title=f"mean of {AVERAGE_OVER}",
                cells=[_number(row.recent.mean if row.recent else None) for row in rows],
                importance=60,
            ),
            Column(
                title="since 1st val" if is_validated else "change",
                cells=[_change(row.improvement) for row in rows],
                styles=[
                    _VERDICT_STYLES.get(row.improvement.verdict, "") if row.improvement else ""
                    for row in rows
                ],
                importance=80,
            ),
            Column(title="val", cells=[_number(row.validation) for row in rows], importance=40),
            Column(
                title="prompts", cells=[_number(row.count, ".0f") for row in rows], importance=50
            ),
            Column(
                title="solved",
                cells=[_number(row.pass_rate, ".0%") for row in rows],
                importance=30,
            ),
        ]
        return table(columns, self._width)

    def _sparks(self, points: Sequence[tuple[int, float]], width: int) -> str:
        """The course of a curve: a character for so many steps, from its least to its greatest."""
        marks = _MARKS if self._ascii else _BLOCKS
        values = [value for _, value in means_of(points, width)]
        if not values:
            return ""
        low, high = min(values), max(values)
        if high <= low:
            return marks[len(marks) // 2] * len(values)
        top = len(marks) - 1
        return "".join(marks[round((value - low) / (high - low) * top)] for value in values)

    def _ratio(self) -> list[Text]:
        if self._board.ratio_error is None:
            return []
        step, cumulative = self._board.ratio_error
        words = f"{step:.0f} prompts this step, {cumulative:.0f} cumulative"
        return [self._titled("ratio error", words, "red" if step or cumulative else "")]

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
        words = []
        if limits is not None:
            words.append(f"slowest {self._phase(limits.phase)} {limits.phase_s:.1f} s")
            if after_s:
                words.append(f"{self._phase(AFTER_STEP)} +{after_s:.1f} s")
            if limits.tool_share is not None and limits.limiter_share is not None:
                words.append(
                    f"rollouts: tools {limits.tool_share:.0%}, limiter {limits.limiter_share:.0%}"
                )
            order = [(name, seconds) for name, seconds in order if name != limits.phase]
        words.append(", ".join(f"{self._phase(name)} {s:.1f}" for name, s in order if s >= 0.05))
        title = f"step {limits.step_s:.1f} s" if limits else "seconds"
        return [bar, self._titled(title, "; ".join(filter(None, words)))]

    def _phase(self, name: str) -> str:
        return self._text(PHASE_WORDS.get(name, name))

    def _limiter(self) -> list[Text]:
        row = self._sight.limiter or self._board.limiter
        if row is None:
            return []
        rate = "" if row.per_minute is None else f" of {row.per_minute:,.0f}/min"
        words = [
            f"{self._bar(row.utilisation, 10)} {row.utilisation:.0%}{rate}",
            f"granted {row.granted:,.0f}",
            f"waiting {row.waiting:,.0f}",
        ]
        if row.rate_factor < 1:
            words.append(f"slowed down to {row.rate_factor:.0%}")
        if row.paused_s > 0:
            words.append(f"paused for {clock(row.paused_s)}")
        if not row.is_live:
            words.append("at the last step")
        is_bad = row.rate_factor < 1 or row.paused_s > 0
        return [self._titled("limiter", "  ".join(words), "yellow" if is_bad else "")]

    def _tools(self) -> list[Text]:
        rows = self._board.tools
        if not rows:
            return []
        columns = [
            Column(
                title="tool",
                cells=[self._name(row.tool).ljust(11) for row in rows],
                importance=100,
                is_text=True,
            ),
            Column(title="calls", cells=[f"{row.calls}" for row in rows], importance=60),
            Column(title="p50 s", cells=[_number(row.p50_s) for row in rows], importance=70),
            Column(title="p95 s", cells=[_number(row.p95_s) for row in rows], importance=80),
            Column(
                title="errors",
                cells=[_number(row.error_rate, ".1%") for row in rows],
                importance=90,
            ),
        ]
        return table(columns, self._width)

    def _stuck(self) -> list[Text]:
        now = self._sight.now
        longest = sorted(self._sight.stuck, key=lambda each: each.waited_s, reverse=True)
        lines = [
            self._titled("" if number else "stuck", self._text(each.words(now)), "yellow")
            for number, each in enumerate(longest)
        ]
        return lines if len(lines) <= _MOST_STUCK else cut(lines, _MOST_STUCK + 1)

    def _run_warnings(self) -> list[Text]:
        warnings = list(self._board.warnings)
        if count := self._sight.passed_over:
            warnings.append(passed_over_words(count))
        return [
            self._titled("" if number else "warning", self._text(warning), "yellow")
            for number, warning in enumerate(warnings)
        ]

    def _log_warnings(self) -> list[Text]:
        lines = []
        for warned in reversed(self._sight.warned):  # the newest stays when there is no room
            times = f"{warned.count:,} times: " if warned.count > 1 else ""
            lines.append(
                self._titled(
                    f"log {warned.level.lower()}",
                    times + self._text(warned.text),
                    _LEVEL_STYLES.get(warned.level, "red"),
                )
            )
        return lines
