"""SVG charts of series over steps: no script, no network, text escaped. Pure.

A chart is one `<svg>` that stands in an HTML page or, with `STYLE_LIGHT`, in an image. Colours come
from the classes `c0` to `c7`, so that a page can have other ones in the dark.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from verl_mixed.run.text import printable
from verl_mixed.views.summary import Points, in_buckets

WIDTH, HEIGHT = 540, 246
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 18, 54, 22
_CHARACTER = 6.1
"""Width of one of the legend, roughly."""

BUCKETS = 120
"""Of the step axis in `thin`: about four pixels each."""

LEAST_BUCKETS = 12
"""Of the step axis, however many curves a page has."""

MOST_POINTS = 40_000
"""Of all curves of a page, about ten bytes each: what `buckets_for` keeps to where it can."""

MOST_DOTS = 40
"""Points of a curve that are marked; of a longer one none is."""

LONGEST_NAME = 28
"""Characters of a name in a legend."""

_LIGHT = ("#2f6fc4", "#c2591b", "#2c8a4b", "#9447b8", "#b83254", "#7d6c1e", "#16858c", "#6b7280")
_DARK = ("#6ea8f2", "#f0925a", "#63c283", "#c78be6", "#f0819c", "#cdb85a", "#5cc7cd", "#a3abb8")
COLORS = len(_LIGHT)

_BASE = (
    "svg text{font:11px system-ui,'DejaVu Sans',sans-serif}"
    "svg .title{font-size:13px;font-weight:600}svg .line{fill:none;stroke:currentColor;"
    "stroke-width:1.8;stroke-linejoin:round}svg .faint{stroke-width:1;opacity:.3}"
    "svg .band{fill:currentColor;opacity:.14}svg .area{fill:currentColor;opacity:.75}"
    "svg .dot,svg .key{fill:currentColor}svg .dashed{stroke-dasharray:5 3}"
)


def _theme(colors: Sequence[str], ink: str, soft: str, line: str, page: str) -> str:
    looks = {
        "svg text": f"fill:{soft}",
        "svg .title": f"fill:{ink}",
        "svg .on": f"fill:{page}",
        "svg .grid": f"stroke:{line}",
        **{f".c{i}": f"color:{color}" for i, color in enumerate(colors)},
    }
    return "".join(f"{selector}{{{look}}}" for selector, look in looks.items())


STYLE_LIGHT = _BASE + _theme(_LIGHT, "#1c1f24", "#5d6571", "#dfe3e8", "#ffffff")
STYLE_DARK = _theme(_DARK, "#e4e7ec", "#9aa3b0", "#343a44", "#14171c")


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One line of a chart, or one layer of a stack."""

    name: str
    points: Points
    color: int = 0
    """Index into the palette; from `COLORS` on the same colours are dashed."""

    faint: bool = False
    """Drawn thin behind the others and left out of the legend."""

    dots: bool = False
    """Points are marked and say their value under the mouse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """An interval around a curve of the same colour."""

    points: Sequence[tuple[int, float, float]]
    """(step, low, high)"""
    color: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """What one chart shows."""

    title: str
    curves: Sequence[Curve] = ()
    bands: Sequence[Band] = ()
    layers: Sequence[Curve] = ()
    """A stack of areas under the curves, lowest first; a layer is 0 where it has no point."""

    floor: float | None = 0.0
    """The value axis reaches at least this low; None: as low as the values."""
    ceiling: float | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is no point to draw."""
        return not any(finite(curve.points) for curve in [*self.curves, *self.layers])


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """Ends of both axes."""

    first: float
    last: float
    low: float
    high: float


def finite(points: Points) -> list[tuple[int, float]]:
    """The points that can be drawn."""
    return [point for point in points if math.isfinite(point[1])]


def thin(points: Points, buckets: int = BUCKETS) -> list[tuple[int, float]]:
    """Fewer points of a long series: the smallest and the largest of each bucket of steps.

    What is left are points of the series, in order, its ends among them: no extreme is lost, and
    a series of up to two points a bucket comes back whole.

    Args:
        points: steps ascending.
        buckets: equal parts of the step axis, at least 1.
    """
    if len(points) <= 2 * buckets:
        return list(points)
    kept = {0, len(points) - 1}
    for own in in_buckets([step for step, _ in points], buckets):
        kept.add(min(own, key=lambda i: points[i][1]))
        kept.add(max(own, key=lambda i: points[i][1]))
    return [points[i] for i in sorted(kept)]


def thin_band(
    points: Sequence[tuple[int, float, float]], buckets: int = BUCKETS
) -> list[tuple[int, float, float]]:
    """The lowest low and the highest high of each bucket, so that no part of a band is lost."""
    if len(points) <= 2 * buckets:
        return list(points)
    return [
        (points[own[0]][0], min(points[i][1] for i in own), max(points[i][2] for i in own))
        for own in in_buckets([step for step, _, _ in points], buckets)
    ]


def means(points: Points, steps: Sequence[int], buckets: int = BUCKETS) -> list[float]:
    """Mean of a layer in each bucket of `steps`, 0 where it has no point: sums stay sums."""
    known = dict(points)
    groups = [[i] for i in range(len(steps))]
    if len(steps) > 2 * buckets:
        groups = in_buckets(steps, buckets)
    return [sum(known.get(steps[i], 0.0) for i in own) / len(own) for own in groups]


def buckets_for(panels: Iterable[Panel]) -> int:
    """Buckets of the step axis with which a page of these panels stays small."""
    lengths: list[int] = []
    for panel in panels:
        lengths += [len(curve.points) for curve in panel.curves]
        lengths += [len(each.points) for each in (*panel.bands, *panel.layers) for _ in range(2)]
    drawn = sum(min(length, 2 * BUCKETS) for length in lengths)
    return max(LEAST_BUCKETS, BUCKETS * MOST_POINTS // max(drawn, MOST_POINTS))


def axes_of(panels: Iterable[Panel]) -> Axes | None:
    """Axes that hold all of some panels; None without a point."""
    steps: list[float] = []
    values: list[float] = []
    for panel in panels:
        for curve in panel.curves:
            for step, value in finite(curve.points):
                steps.append(step)
                values.append(value)
        for band in panel.bands:
            values += [end for _, *ends in band.points for end in ends if math.isfinite(end)]
        if panel.layers:
            own = _steps_of(panel.layers)
            steps += own
            values += [sum(column) for column in zip(*_stack(panel.layers, own), strict=True)]
        if values:
            values += [end for end in (panel.floor, panel.ceiling) if end is not None]
    if not steps:
        return None
    first, low, high = min(steps), min(values), max(values)
    if high <= low:
        low, high = low - abs(low) / 2, high + (abs(high) / 2 or 1)
    return Axes(first=first, last=max(*steps, first + 1), low=low, high=high)


def _steps_of(layers: Sequence[Curve]) -> list[int]:
    return sorted({step for layer in layers for step, _ in layer.points})


def _stack(
    layers: Sequence[Curve], steps: Sequence[int], buckets: int = BUCKETS
) -> list[list[float]]:
    return [means(finite(layer.points), steps, buckets) for layer in layers]


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers between two ends, about `count`; 1, 2 or 5 times a power of ten apart."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)
    start = math.ceil(low / step - 1e-9)
    return [n * step for n in range(start, math.floor(high / step + 1e-9) + 1)]


def number(value: float) -> str:
    """A number as charts and tables write it: three digits, thousands whole."""
    if not math.isfinite(value):
        return "none"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    size = abs(value)
    text = f"{value:.1f}" if size >= 10 else f"{value:.3f}" if size >= 0.01 else f"{value:.2g}"
    return text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text


def words(text: object, longest: int = 400) -> str:
    """Text for a page: escaped, no control characters or changes of direction, cut when long."""
    clean = printable(str(text)[: longest + 1])
    return escape(clean if len(clean) <= longest else clean[: longest - 1] + "…")


def draw(panel: Panel, axes: Axes | None = None, buckets: int = BUCKETS) -> str:
    """A panel as an `<svg>` of `WIDTH` by `HEIGHT`.

    Args:
        panel: not empty.
        axes: of several panels beside each other; None: its own.
        buckets: of the step axis; of each two points of a curve are drawn.
    """
    axes = axes or axes_of([panel])
    if axes is None:
        raise ValueError(f"cannot draw panel={panel.title!r}: it has no point; leave it out")
    place = _Place(axes)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{words(panel.title)}"><text class="title" x="0" y="13">'
        f"{words(panel.title)}</text>",
        _legend([*panel.layers, *panel.curves]),
        _grid(axes, place),
        *_areas(panel.layers, place, buckets),
        *(_band(band, place, buckets) for band in panel.bands),
        *(_line(curve, place, buckets) for curve in panel.curves if curve.points),
        "</svg>",
    ]
    return "".join(parts)


def bar(parts: Sequence[tuple[str, float, int]], whole: float) -> str:
    """One horizontal bar whose parts are as wide as their values, as an `<svg>`.

    Args:
        parts: (name, value, color), at least one value above 0.
        whole: what the parts' shares are of; less than their sum where they overlap.
    """
    total, x, drawn = sum(value for _, value, _ in parts), 0.0, []
    for name, value, color in parts:
        width = WIDTH * value / total
        label = words(name) if width > len(name) * _CHARACTER + 8 else ""
        drawn.append(
            f'<g class="c{color % COLORS}"><rect class="key" x="{x:.1f}" y="0" '
            f'width="{max(0.0, width - 1):.1f}" height="22"><title>{words(name)}: '
            f"{value / whole:.1%}</title></rect></g>"
            f'<text class="on" x="{x + 5:.1f}" y="15">{label}</text>'
        )
        x += width
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 22" role="img" '
        f'aria-label="shares">{"".join(drawn)}</svg>'
    )


class _Place:
    """Pixels of a point, written short."""

    def __init__(self, axes: Axes) -> None:
        self._first, self._high = axes.first, axes.high
        self._x = (WIDTH - _LEFT - _RIGHT) / (axes.last - axes.first)
        self._y = (HEIGHT - _TOP - _BOTTOM) / (axes.high - axes.low)

    def x(self, step: float) -> str:
        return f"{_LEFT + (step - self._first) * self._x:.1f}".removesuffix(".0")

    def y(self, value: float) -> str:
        return f"{_TOP + (self._high - value) * self._y:.1f}".removesuffix(".0")

    def path(self, points: Iterable[tuple[float, float]]) -> str:
        return " ".join(f"{self.x(step)},{self.y(value)}" for step, value in points)


def _legend(curves: Sequence[Curve]) -> str:
    """Names in their colours, in two rows; those that find no room are counted."""
    named = {curve.name: curve for curve in curves if not curve.faint and curve.points}
    parts, x, y = [], 0.0, 29
    for i, (name, curve) in enumerate(named.items()):
        short = name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"
        room = 22 + len(short) * _CHARACTER
        if x and x + room > WIDTH - 50 * (y > 29):
            if y > 29:
                parts.append(f'<text x="{x:.0f}" y="{y}">+ {len(named) - i} more</text>')
                break
            x, y = 0.0, 43
        parts.append(
            f'<g class="c{curve.color % COLORS}"><rect class="key" x="{x:.0f}" y="{y - 8}" '
            f'width="9" height="9"/></g><text x="{x + 12:.0f}" y="{y}">{words(short)}</text>'
        )
        x += room
    return "".join(parts)


def _grid(axes: Axes, place: _Place) -> str:
    parts = []
    for value in ticks(axes.low, axes.high):
        y = place.y(value)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>'
            f'<text x="{_LEFT - 5}" y="{y}" dy="4" text-anchor="end">{number(value)}</text>'
        )
    for step in ticks(axes.first, axes.last, 8):
        if step == int(step):
            parts.append(
                f'<text x="{place.x(step)}" y="{HEIGHT - 6}" text-anchor="middle">{step:.0f}</text>'
            )
    return "".join(parts)


def _line(curve: Curve, place: _Place, buckets: int) -> str:
    points = thin(finite(curve.points), buckets)
    if not points:
        return ""
    looks = "line" + (" faint" if curve.faint else "") + (" dashed" * (curve.color >= COLORS))
    step, value = points[-1]
    title = "" if curve.faint else f"<title>{words(curve.name)}: {number(value)} at {step}</title>"
    parts = [f'<polyline class="{looks}" points="{place.path(points)}">{title}</polyline>']
    if (curve.dots and len(points) <= MOST_DOTS) or len(points) == 1:
        parts += [
            f'<circle class="dot" cx="{place.x(step)}" cy="{place.y(value)}" r="3">'
            f"<title>{words(curve.name)}: {number(value)} at step {step}</title></circle>"
            for step, value in points
        ]
    return f'<g class="c{curve.color % COLORS}">{"".join(parts)}</g>'


def _band(band: Band, place: _Place, buckets: int) -> str:
    points = thin_band(band.points, buckets)
    around = [(step, high) for step, _, high in points]
    around += [(step, low) for step, low, _ in reversed(points)]
    polygon = f'<polygon class="band" points="{place.path(around)}"/>'
    return f'<g class="c{band.color % COLORS}">{polygon}</g>'


def _areas(layers: Sequence[Curve], place: _Place, buckets: int) -> list[str]:
    if not layers:
        return []
    steps = _steps_of(layers)
    at = means([(step, float(step)) for step in steps], steps, buckets)
    stack = _stack(layers, steps, buckets)
    if len(at) == 1:  # one step: a block instead of a line
        at, stack = [at[0], at[0] + 1], [heights * 2 for heights in stack]
    bottom, parts = [0.0] * len(at), []
    for layer, heights in zip(layers, stack, strict=True):
        top = [low + height for low, height in zip(bottom, heights, strict=True)]
        around = [*zip(at, top, strict=True), *reversed(list(zip(at, bottom, strict=True)))]
        parts.append(
            f'<g class="c{layer.color % COLORS}"><polygon class="area" '
            f'points="{place.path(around)}"><title>{words(layer.name)}</title></polygon></g>'
        )
        bottom = top
    return parts
