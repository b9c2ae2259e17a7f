"""Charts of series over steps, as Vega-Lite specifications for a page and for an image.

The package `vl-convert-python` holds the scripts that draw a specification in a browser, and a
program that draws it as an image. Neither needs the network. The package is imported when it is
first used, because most commands draw nothing.
"""

import json
import math
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from agent_loop.records.run_folder import write_text
from verl_mixed.run.user_cache import user_cache
from verl_mixed.views.report.text import plain
from verl_mixed.views.summary import Points, in_buckets

TEMPLATES = Path(__file__).parent / "templates"
"""The files of which a page is made."""

COLORS = (
    *("#3f7fd4", "#cc6420", "#31955a", "#a25fc6"),
    *("#d4506f", "#8f7b1f", "#188f97", "#78818f"),
)
"""Colours of curves. Each can be told from a white and from a dark background."""

BUCKETS = 120
"""Buckets of the step axis in `thin`: about four pixels each."""

LEAST_BUCKETS = 12
"""Buckets of the step axis on a page with any number of curves."""

MOST_POINTS = 40_000
"""Points of all curves of a page, about 16 bytes each. `buckets_for` keeps to it where it can."""

MOST_DOTS = 40
"""A curve with `dots` has its points marked up to this number of points."""

LONGEST_NAME = 100
"""Characters of a name in a chart; the legend shows the first 17 or so."""

IMAGE_SIZE = (450, 150)
"""Width and height of a chart's plot in the image, pixels."""

IMAGE_COLUMNS = 3
"""Charts beside each other in the image."""

_COLUMNS = [
    {"calculate": f"datum[{i}]", "as": name}
    for i, name in enumerate(("series", "step", "y", "low"))
]
"""Names of the columns of a chart's rows. The rows are arrays: names would treble their size."""


Axes = tuple[tuple[float, float], tuple[float, float]]
"""The ends of both axes: (first, last) step, (low, high) value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One line of a chart, or one layer of a stack."""

    name: str
    points: Points
    color: int = 0
    """Index into `COLORS`. From the length of `COLORS` on, the colours repeat and are dashed."""

    faint: bool = False
    """The curve is drawn thin and is left out of the legend."""

    dots: bool = False
    """The points are marked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """An interval around a curve of the same colour."""

    points: Sequence[tuple[int, float, float]]
    """(step, low, high)"""
    color: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """The contents of one chart."""

    title: str
    curves: Sequence[Curve] = ()
    bands: Sequence[Band] = ()
    layers: Sequence[Curve] = ()
    """A stack of areas under the curves, lowest first. A layer is 0 where it has no point."""

    floor: float | None = 0.0
    """The value axis reaches down to this value at least; None: to the smallest value."""
    ceiling: float | None = None
    """The value axis reaches up to this value at least; None: to the largest value."""

    @property
    def is_empty(self) -> bool:
        """Whether there is no point to draw."""
        return not any(finite(curve.points) for curve in [*self.curves, *self.layers])


def finite(points: Points) -> list[tuple[int, float]]:
    """The points without those whose value is infinite or NaN."""
    return [point for point in points if math.isfinite(point[1])]


def thin(points: Points, buckets: int = BUCKETS) -> list[tuple[int, float]]:
    """Fewer points of a long series: the smallest and the largest of each bucket of steps.

    The result is a part of the series, in order, with its first and its last point. No extreme is
    lost. A series of up to two points a bucket comes back whole. Steps must ascend.
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
    drawn = 0
    for panel in panels:
        for each in (*panel.curves, *panel.bands, *panel.bands, *panel.layers, *panel.layers):
            drawn += min(len(each.points), 2 * BUCKETS)
    return max(LEAST_BUCKETS, BUCKETS * MOST_POINTS // max(drawn, MOST_POINTS))


def axes_of(panels: Iterable[Panel]) -> Axes | None:
    """Axes on which all points of some panels lie; None without a point."""
    steps: list[float] = []
    values: list[float] = []
    for panel in panels:
        for curve in panel.curves:
            for step, value in finite(curve.points):
                steps.append(step)
                values.append(value)
        for band in panel.bands:
            values += [end for _, *ends in band.points for end in ends if math.isfinite(end)]
        for _, stretch in _stack(panel.layers):
            steps += [step for step, _, _ in stretch]
            values += [top for _, _, top in stretch]
        if values:
            values += [end for end in (panel.floor, panel.ceiling) if end is not None]
    if not steps:
        return None
    first, low, high = min(steps), min(values), max(values)
    if high <= low:
        low, high = low - abs(low) / 2, high + (abs(high) / 2 or 1)
    return (first, max(*steps, first + 1)), (low, high)


def _stack(
    layers: Sequence[Curve], buckets: int = BUCKETS
) -> list[tuple[Curve, list[tuple[float, float, float]]]]:
    """Each layer with its (step, bottom, top), on top of the layers before it."""
    steps = sorted({step for layer in layers for step, _ in layer.points})
    places = means([(step, float(step)) for step in steps], steps, buckets)
    bottom = [0.0] * len(places)
    stack = []
    for layer in layers:
        heights = means(finite(layer.points), steps, buckets)
        top = [low + height for low, height in zip(bottom, heights, strict=True)]
        stretch = list(zip(places, bottom, top, strict=True))
        if len(stretch) == 1:  # an area of one step has no width: it is drawn to the next step
            stretch.append((places[0] + 1, bottom[0], top[0]))
        stack.append((layer, stretch))
        bottom = top
    return stack


def _short(value: float, digits: int) -> float:
    """A value rounded to some significant digits, whole numbers without a decimal point."""
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() else rounded


def specification(panel: Panel, axes: Axes | None = None, buckets: int = BUCKETS) -> dict[str, Any]:
    """The part of a Vega-Lite specification that a panel has to itself.

    `shared_specification` is the other part. Names from a run are values in the specification,
    never parts of an expression, so that a name cannot be executed. Panels beside each other have
    the same `axes`; None takes the panel's own. Two points of a curve are drawn for each bucket of
    the step axis.

    Raises:
        ValueError: the panel is empty.
    """
    axes = axes or axes_of([panel])
    if axes is None:
        raise ValueError(f"cannot draw panel={panel.title!r}: it has no point; leave it out")
    series: list[dict[str, Any]] = []
    rows: list[list[float]] = []
    colors: dict[str, str] = {}

    def add(name: str, color: int, kind: str, points: Iterable[tuple[float, ...]]) -> None:
        name = plain(name, LONGEST_NAME)
        colors.setdefault(name, COLORS[color % len(COLORS)])
        dashed = color >= len(COLORS)
        for step, *ends in points:
            rows.append([len(series), _short(step, 8), *(_short(end, 5) for end in ends)])
        series.append({"series": len(series), "curve": name, "kind": kind, "dashed": dashed})

    for layer, stretch in _stack(panel.layers, buckets):
        add(layer.name, layer.color, "area", [(step, top, low) for step, low, top in stretch])
    named = {curve.color: curve.name for curve in panel.curves}
    for band in panel.bands:
        points = [(step, high, low) for step, low, high in thin_band(band.points, buckets)]
        add(named.get(band.color, ""), band.color, "band", points)
    for curve in panel.curves:
        points = thin(finite(curve.points), buckets)
        is_dotted = (curve.dots and len(points) <= MOST_DOTS) or len(points) == 1
        kind = "dots" if is_dotted else "faint" if curve.faint else "line"
        add(curve.name, curve.color, kind, points)

    in_legend = dict.fromkeys(
        plain(curve.name, LONGEST_NAME)
        for curve in (*panel.layers, *panel.curves)
        if curve.points and not curve.faint
    )
    table = {"data": {"values": series}, "key": "series", "fields": ["curve", "kind", "dashed"]}
    legend = {"legend": {"values": list(in_legend)}}
    scale = {"domain": list(colors), "range": list(colors.values())}
    return {
        "title": plain(panel.title),
        "data": {"values": rows},
        "transform": [*_COLUMNS, {"lookup": "series", "from": table}],
        "encoding": {
            "x": _quantity("step", axes[0]),
            "y": _quantity("y", axes[1]),
            "color": {"field": "curve", "type": "nominal", "scale": scale} | legend,
        },
    }


def _quantity(field: str, domain: tuple[float, float]) -> dict[str, Any]:
    scale = {"domain": [*domain], "nice": False, "zero": False}
    return {"field": field, "type": "quantitative", "scale": scale, "title": None}


def shared_specification() -> dict[str, Any]:
    """The part of a Vega-Lite specification that all charts of a page have: `chart.json`.

    The value nearest to the pointer is shown: the pointer is in the Voronoi cell of a point, and
    the datum of the cell is that point. Dragging moves the axes, the wheel with Ctrl (or a pinch)
    zooms, and a double click shows the whole chart again.
    """
    return json.loads((TEMPLATES / "chart.json").read_text(encoding="utf-8"))


def drawing_scripts() -> str:
    """Vega, Vega-Lite and vega-embed as one script, which defines `window.vegaEmbed`.

    The package puts the script together in two seconds; the user's cache keeps it.
    """
    name = f"vega-embed-{version('vl-convert-python')}.js"
    with suppress(OSError):
        return (user_cache() / name).read_text(encoding="utf-8")

    import vl_convert

    script = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    with suppress(OSError):  # the cache cannot be written
        draft = user_cache() / f"{name}.{os.getpid()}"  # two reports may be made at once
        write_text(draft, script)
        draft.replace(user_cache() / name)
    return script


def image(groups: Sequence[tuple[str, Sequence[str], Sequence[Panel]]]) -> bytes:
    """Charts as one PNG on white; groups of (title, sentences, panels), one above the other."""
    import vl_convert

    buckets = buckets_for(panel for _, _, panels in groups for panel in panels)
    shared = shared_specification()
    config = shared.pop("config")
    width, height = IMAGE_SIZE
    marks = [
        {name: part for name, part in layer.items() if name != "params"}
        for layer in shared["layer"][:-1]  # without what the pointer does
    ]
    own = {"width": width, "height": height, "layer": marks}
    parts = []
    for title, sentences, panels in groups:
        text = {"text": plain(title), "subtitle": [plain(line) for line in sentences]}
        text |= {"fontSize": 20, "subtitleFontSize": 14, "subtitlePadding": 8, "offset": 24}
        charts = [own | specification(panel, None, buckets) for panel in panels]
        resolve = {"scale": {"color": "independent"}}
        columns = {"columns": IMAGE_COLUMNS, "spacing": 26}
        parts.append({"title": text, "concat": charts, "resolve": resolve} | columns)
    return vl_convert.vegalite_to_png(
        {"vconcat": parts, "padding": 30, "spacing": 40, "background": "#ffffff"},
        config=config,
        scale=1,
        allowed_base_urls=[],  # data are in the specification: no address is ever read
    )
