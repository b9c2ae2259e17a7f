"""Specifications of charts, and the text of names and numbers."""

import json
from collections.abc import Sequence
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import vl_convert
from hypothesis import given
from hypothesis import strategies as st

from verl_mixed.views.report.charts import (
    COLORS,
    MOST_DOTS,
    Band,
    Curve,
    Panel,
    axes_of,
    drawing_scripts,
    image,
    means,
    specification,
    thin,
    thin_band,
)
from verl_mixed.views.report.text import number, plain

SERIES = st.lists(
    st.tuples(st.integers(1, 50), st.floats(-1e6, 1e6)), min_size=1, max_size=400
).map(lambda gaps: [(sum(g for g, _ in gaps[: i + 1]), value) for i, (_, value) in enumerate(gaps)])

HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</svg></style><script>",
    "\x00\x1b[2J\ud800\u202eevil\u2066",
    "x" * 1_000_000,
)


def rows_of(chart: dict[str, Any], kind: str) -> list[list[Sequence[float]]]:
    """The rows (step, value, low) of each series of one kind."""
    own = [
        series["series"]
        for series in chart["transform"][-1]["from"]["data"]["values"]
        if series["kind"] == kind
    ]
    return [[row[1:] for row in chart["data"]["values"] if row[0] == index] for index in own]


def names_of(chart: dict[str, Any]) -> dict[str, str]:
    """Name -> colour."""
    scale = chart["encoding"]["color"]["scale"]
    return dict(zip(scale["domain"], scale["range"], strict=True))


@given(points=SERIES, buckets=st.integers(1, 40))
def test_thinning_keeps_the_ends_and_every_extreme(
    points: list[tuple[int, float]], buckets: int
) -> None:
    kept = thin(points, buckets)

    assert kept == sorted(set(kept) & set(points), key=lambda point: point[0])
    assert len(kept) <= max(2 * buckets + 2, min(len(points), 2 * buckets))
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    values, left = [v for _, v in points], [v for _, v in kept]
    assert (min(values), max(values)) == (min(left), max(left))
    if len(points) <= 2 * buckets:
        assert kept == points
    else:  # no part of the axis loses its own extremes
        width = points[-1][0] - points[0][0] + 1
        for bucket in range(buckets):
            own = [v for s, v in points if (s - points[0][0]) * buckets // width == bucket]
            drawn = [v for s, v in kept if (s - points[0][0]) * buckets // width == bucket]
            assert not own or (min(own), max(own)) == (min(drawn), max(drawn))


@given(points=SERIES, buckets=st.integers(1, 40))
def test_a_thinned_band_reaches_as_far_as_the_whole(
    points: list[tuple[int, float]], buckets: int
) -> None:
    band = [(step, value - 1, value + 2) for step, value in points]

    kept = thin_band(band, buckets)

    assert min(low for _, low, _ in kept) == min(low for _, low, _ in band)
    assert max(high for _, _, high in kept) == max(high for _, _, high in band)


@given(steps=st.integers(1, 300), buckets=st.integers(1, 40))
def test_a_stack_of_means_is_the_mean_of_the_stack(steps: int, buckets: int) -> None:
    axis = list(range(1, steps + 1))
    some = [(step, float(step)) for step in axis if step % 3]
    every = [(step, 2.0) for step in axis]
    both = [(step, 2.0 + (step if step % 3 else 0)) for step in axis]

    heights = zip(means(some, axis, buckets), means(every, axis, buckets), strict=True)

    assert [a + b for a, b in heights] == pytest.approx(means(both, axis, buckets))


@given(points=SERIES)
def test_every_point_lies_within_the_axes(points: list[tuple[int, float]]) -> None:
    band = Band(points=[(step, value - 1, value + 1) for step, value in points])
    chart = specification(
        Panel(title="a", curves=[Curve(name="a", points=points)], bands=[band]), buckets=20
    )

    (first, last), (low, high) = (chart["encoding"][axis]["scale"]["domain"] for axis in ("x", "y"))
    slack = 1e-4 * max(abs(low), abs(high))
    for _, step, *values in chart["data"]["values"]:
        assert first <= step <= last
        assert all(low - slack <= value <= high + slack for value in values)


def test_a_curve_has_the_colour_that_it_is_given_and_repeated_colours_are_dashed() -> None:
    curves = [
        Curve(name="math", points=[(1, 0.0), (2, 1.0)], color=len(COLORS) + 2),
        Curve(name="math", points=[(1, 0.5), (2, 0.5)], color=len(COLORS) + 2, faint=True),
        Curve(name="each step", points=[(1, 0.5), (2, 0.5)], faint=True),
    ]

    chart = specification(Panel(title="Reward", curves=curves))

    assert rows_of(chart, "line") == [[[1, 0], [2, 1]]]
    assert len(rows_of(chart, "faint")) == 2
    assert names_of(chart) == {"math": COLORS[2], "each step": COLORS[0]}
    assert chart["encoding"]["color"]["legend"]["values"] == ["math"]
    table = chart["transform"][-1]["from"]["data"]["values"]
    assert [series["dashed"] for series in table] == [True, True, False]


def test_points_are_marked_while_they_are_few() -> None:
    def kinds(length: int, dots: bool) -> list[str]:
        curve = Curve(name="a", points=[(i, 1.0) for i in range(length)], dots=dots)
        chart = specification(Panel(title="a", curves=[curve]))
        return [series["kind"] for series in chart["transform"][-1]["from"]["data"]["values"]]

    assert kinds(MOST_DOTS, True) == kinds(1, False) == ["dots"]
    assert kinds(MOST_DOTS + 1, True) == kinds(2, False) == ["line"]


def test_layers_stand_on_each_other_and_a_missing_point_is_none() -> None:
    layers = [
        Curve(name="gen", points=[(1, 1.0), (2, 1.0)]),
        Curve(name="save", points=[(2, 3.0)], color=1),
    ]

    below, above = rows_of(specification(Panel(title="Time", layers=layers)), "area")

    assert below == [[1, 1, 0], [2, 1, 0]]
    assert above == [[1, 1, 1], [2, 4, 1]]  # no height in step 1


def test_an_area_of_one_step_has_a_width() -> None:
    layer = Curve(name="gen", points=[(7, 2.0)])

    assert rows_of(specification(Panel(title="Time", layers=[layer])), "area") == [
        [[7, 2, 0], [8, 2, 0]]
    ]


def test_panels_beside_each_other_have_the_same_axes() -> None:
    panels = [
        Panel(title="a", curves=[Curve(name="a", points=[(1, 1.0), (9, 2.0)])]),
        Panel(title="b", curves=[Curve(name="b", points=[(5, -3.0)])]),
    ]

    assert axes_of(panels) == ((1, 9), (-3, 2))
    assert axes_of([Panel(title="none")]) is None


@pytest.mark.parametrize("value", [0.0, 1.0, -2.0, 1e12, 1e-9])
def test_equal_values_have_an_axis(value: float) -> None:
    chart = specification(
        Panel(title="a", curves=[Curve(name="a", points=[(3, value)])], floor=None)
    )

    low, high = chart["encoding"]["y"]["scale"]["domain"]
    assert low < high and low <= value <= high
    assert chart["encoding"]["x"]["scale"]["domain"] == [3, 4]


def test_what_is_no_number_is_not_drawn() -> None:
    panel = Panel(title="a", curves=[Curve(name="a", points=[(1, nan), (2, 1.0), (3, inf)])])

    assert specification(panel)["data"]["values"] == [[0, 2, 1]]
    with pytest.raises(ValueError, match="no point; leave it out"):
        specification(Panel(title="a", curves=[Curve(name="a", points=[(1, nan)])]))


def expressions(value: object, key: str = "") -> list[str]:
    """Everything in a specification that Vega reads as a program."""
    if isinstance(value, dict):
        return [text for k, v in value.items() for text in expressions(v, str(k))]
    if isinstance(value, list):
        return [text for v in value for text in expressions(v, key)]
    return [str(value)] if key in ("expr", "calculate", "filter", "test", "signal") else []


@pytest.mark.parametrize("text", [*HOSTILE, "'+alert(1)+'", '{"expr": "alert(1)"}'])
def test_hostile_names_are_values_and_no_expressions(text: str) -> None:
    points = [(1, 1.0), (2, 2.0)]
    curves = [Curve(name=text, points=points, dots=True)]
    harmless = [Curve(name="a", points=points, dots=True)]

    chart = specification(Panel(title=text, curves=curves, layers=curves))

    assert expressions(chart) == expressions(
        specification(Panel(title="a", curves=harmless, layers=harmless))
    )
    (name,) = names_of(chart)
    assert name == plain(text, 100) and "\u202e" not in json.dumps(chart, ensure_ascii=False)
    assert len(json.dumps(chart)) < 20_000


def test_an_image_of_hostile_names_is_drawn() -> None:
    curves = [Curve(name=text, points=[(1, 1.0), (2, 2.0)]) for text in HOSTILE]
    panels = [Panel(title=text, curves=curves) for text in HOSTILE]

    drawn = image([("<b>", list(HOSTILE[:4]), panels), ("a run without a step", [], [])])

    assert drawn.startswith(b"\x89PNG")


def test_the_script_is_put_together_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    script = drawing_scripts()
    monkeypatch.delattr(vl_convert, "javascript_bundle")

    assert "window.vegaEmbed" in script
    assert drawing_scripts() == script
    assert [path.suffix for path in tmp_path.glob("*/*")] == [".js"]


def test_without_a_cache_the_script_is_put_together_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(vl_convert, "javascript_bundle", lambda snippet: f"script; {snippet}")

    assert drawing_scripts() == "script; window.vegaEmbed = vegaEmbed;"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.37, "0.37"),
        (0.12345, "0.123"),
        (1.0, "1"),
        (10.0, "10"),
        (999.96, "1000"),
        (12345.6, "12,346"),
        (1.2e-5, "1.2e-05"),
        (-0.5, "-0.5"),
        (nan, "none"),
    ],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text


def test_text_is_cut_and_without_control_characters() -> None:
    assert plain("<a & 'b'>") == "<a & 'b'>"
    assert plain("a\x00b\u202e") == "a b "
    assert plain("abcdef", 4) == "abc…"
    assert plain("abcd", 4) == "abcd"
