"""SVG charts."""

import xml.etree.ElementTree as ElementTree
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_mixed.views.report.charts import (
    COLORS,
    HEIGHT,
    WIDTH,
    Axes,
    Band,
    Curve,
    Panel,
    axes_of,
    bar,
    draw,
    means,
    number,
    thin,
    thin_band,
    ticks,
    words,
)

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


def svg(panel: Panel, axes: Axes | None = None) -> ElementTree.Element:
    return ElementTree.fromstring(draw(panel, axes))


def numbers_in(root: ElementTree.Element, tag: str) -> list[list[tuple[float, float]]]:
    found = []
    for element in root.iter(f"{{http://www.w3.org/2000/svg}}{tag}"):
        pairs = [pair.split(",") for pair in element.attrib["points"].split()]
        found.append([(float(x), float(y)) for x, y in pairs])
    return found


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


@given(low=st.floats(-1e9, 1e9), width=st.floats(1e-3, 1e9), count=st.integers(2, 9))
def test_ticks_are_within_the_axis_and_not_too_many(low: float, width: float, count: int) -> None:
    high = low + width
    slack = (high - low) * 1e-6 + abs(low) * 1e-9

    found = ticks(low, high, count) if high > low else []

    assert len(found) <= 2 * count + 2
    assert all(low - slack <= tick <= high + slack for tick in found)


@given(points=SERIES)
def test_every_point_lies_within_the_picture(points: list[tuple[int, float]]) -> None:
    band = Band(points=[(step, value - 1, value + 1) for step, value in points])
    root = svg(Panel(title="a", curves=[Curve(name="a", points=points)], bands=[band]))

    for shape in numbers_in(root, "polyline") + numbers_in(root, "polygon"):
        assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in shape)


def test_a_curve_goes_up_where_values_do_and_takes_the_colour_it_has() -> None:
    curve = Curve(name="math", points=[(1, 0.0), (2, 1.0), (3, 0.5)], color=COLORS + 2)
    root = svg(Panel(title="Reward", curves=[curve]))

    ((first, second, third),) = numbers_in(root, "polyline")

    assert first[0] < second[0] < third[0]
    assert second[1] < third[1] < first[1]
    groups = [g.attrib["class"] for g in root.iter("{http://www.w3.org/2000/svg}g")]
    assert set(groups) == {"c2"}
    (line,) = root.iter("{http://www.w3.org/2000/svg}polyline")
    assert line.attrib["class"] == "line dashed"


def test_layers_stand_on_each_other_and_a_missing_point_is_none() -> None:
    layers = [
        Curve(name="gen", points=[(1, 1.0), (2, 1.0)]),
        Curve(name="save", points=[(2, 3.0)], color=1),
    ]
    axes = Axes(first=1, last=2, low=0, high=4)

    below, above = numbers_in(svg(Panel(title="Time", layers=layers), axes), "polygon")

    top_of_below = [y for _, y in below[:2]]
    assert above[0][1] == top_of_below[0]  # no height in step 1
    assert above[1][1] == pytest.approx(54)  # 1 + 3 reach the top
    assert [y for _, y in above[:1:-1]] == top_of_below


def test_panels_beside_each_other_have_the_same_axes() -> None:
    panels = [
        Panel(title="a", curves=[Curve(name="a", points=[(1, 1.0), (9, 2.0)])]),
        Panel(title="b", curves=[Curve(name="b", points=[(5, -3.0)])]),
    ]

    assert axes_of(panels) == Axes(first=1, last=9, low=-3, high=2)
    assert axes_of([Panel(title="none")]) is None


@pytest.mark.parametrize("value", [0.0, 1.0, -2.0, 1e12, 1e-9])
def test_equal_values_have_an_axis(value: float) -> None:
    panel = Panel(title="a", curves=[Curve(name="a", points=[(3, value)])], floor=None)

    assert "nan" not in draw(panel)
    assert len(list(svg(panel).iter("{http://www.w3.org/2000/svg}circle"))) == 1


def test_what_is_no_number_is_not_drawn() -> None:
    panel = Panel(title="a", curves=[Curve(name="a", points=[(1, nan), (2, 1.0), (3, inf)])])

    assert "nan" not in draw(panel) and "inf" not in draw(panel)
    with pytest.raises(ValueError, match="no point; leave it out"):
        draw(Panel(title="a", curves=[Curve(name="a", points=[(1, nan)])]))


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_names_are_text(text: str) -> None:
    points = [(1, 1.0), (2, 2.0)]
    curves = [Curve(name=text, points=points, dots=True)]

    drawn = draw(Panel(title=text, curves=curves, layers=curves)) + bar([(text, 1.0, 0)], 1.0)

    root = ElementTree.fromstring(f"<x>{drawn}</x>")
    tags = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert tags <= {
        "x",
        "svg",
        "text",
        "g",
        "rect",
        "line",
        "polygon",
        "polyline",
        "circle",
        "title",
    }
    assert not any(name.startswith("on") for e in root.iter() for name in e.attrib)
    assert len(drawn.encode()) < 20_000


def test_names_that_find_no_room_are_counted() -> None:
    curves = [Curve(name=f"a source of some length {i}", points=[(1, 1.0)]) for i in range(9)]

    texts = [t.text for t in svg(Panel(title="a", curves=curves)).iter() if t.tag.endswith("text")]

    shown = [text for text in texts if text and text.startswith("a source")]
    assert f"+ {9 - len(shown)} more" in texts


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


def test_words_are_escaped_and_cut() -> None:
    assert words("<a & 'b'>") == "&lt;a &amp; &#x27;b&#x27;&gt;"
    assert words("a\x00b\u202e") == "a b "
    assert words("abcdef", 4) == "abc…"
    assert words("abcd", 4) == "abcd"
