"""Charts: axes and labels that can be read, and shapes at the right places."""

import math
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfold.analysis.charts import HEIGHT, WIDTH, Axis, Line, heatmap, lines, stacked, waterfall

UNITS = ["s", "bytes", "share", "", "requests/s"]


def parse(svg):
    """The chart as a tree: that it parses says that it is well-formed."""
    return ElementTree.fromstring(str(svg))


def texts(svg, kind):
    """(x, y, text) of the texts of a class."""
    return [
        (float(node.get("x")), float(node.get("y")), node.text)
        for node in parse(svg).iter("text")
        if node.get("class") == kind and node.get("x")
    ]


@given(st.floats(1e-6, 1e6), st.floats(1.001, 1e6), st.booleans(), st.sampled_from(UNITS), st.integers(0, 1))
def test_ticks_stay_inside_apart_and_in_order(low, ratio, log, unit, flat):
    values = [low, low if flat else low * ratio]
    svg = lines("a chart", [Line(1, values, values)], Axis("x", unit, log), Axis("y", unit, log))
    across, up = texts(svg, "middle"), texts(svg, "end")
    assert len(across) >= 1
    assert len(up) >= 2
    spans = [(x - 3.1 * len(text), x + 3.1 * len(text)) for x, _, text in across]
    assert all(right <= left for (_, right), (left, _) in pairwise(spans))
    assert spans[0][0] >= 0
    assert spans[-1][1] <= WIDTH
    heights = [y for _, y, _ in up]
    assert all(above <= below - 12 for below, above in pairwise(heights))
    assert all(0 <= y <= HEIGHT for y in heights)
    points = re.findall(r"[ML]([0-9.]+),([0-9.]+)", str(svg))
    assert all(0 <= float(x) <= WIDTH and 0 <= float(y) <= HEIGHT for x, y in points)


def test_points_that_a_log_axis_cannot_show_are_left_out():
    svg = lines("t", [Line(1, [0, 1, 10, None], [1, 1, 2, 3])], Axis("x", "s", log=True), Axis("y"))
    assert len(re.findall("[ML]", parse(svg).find("path").get("d"))) == 2
    assert lines("t", [Line(1, [0], [1])], Axis("x", "s", log=True), Axis("y")) == ""
    assert lines("t", [Line(1, [], [])], Axis("x"), Axis("y")) == ""


def test_long_series_keep_their_peaks():
    peak = [0.0] * 50_000
    peak[31_415] = 9.0
    svg = lines("t", [Line(1, list(range(50_000)), peak, step=True)], Axis("x"), Axis("y", high=9.0))
    path = parse(svg).find("path").get("d")
    assert len(path) < 20_000
    assert "V12" in path  # the top of the chart


def test_reference_lines_and_dots_are_where_their_values_are():
    dots = [(1.0, 0.5, "a dot")]
    svg = lines(
        "t",
        [Line(1, [], [], dots)],
        Axis("x", high=2.0),
        Axis("y", high=1.0),
        [(1.0, "limit")],
        [(0.5, "half")],
    )
    tree = parse(svg)
    dot = tree.find("circle")
    marks = [node for node in tree.iter("line") if node.get("class") == "mark"]
    assert dot.find("title").text == "a dot"
    assert {node.get("y1") for node in marks} >= {dot.get("cy")}
    assert {node.get("x1") for node in marks} >= {dot.get("cx")}


def test_a_waterfall_starts_each_bar_where_the_last_one_ended():
    rows = [
        ("all", 0, 100_000, "total", "given"),
        ("a", 100_000, 70_000, "part", "modelled"),
        ("over", 70_000, 90_000, "part", "modelled"),
        ("KV pool", 90_000, 0, "rest", "modelled"),
    ]
    tree = parse(waterfall("t", rows, "bytes"))
    bars = [(float(node.get("x")), float(node.get("width"))) for node in tree.iter("rect")]
    assert bars[1][0] + bars[1][1] == pytest.approx(sum(bars[0]), abs=0.2)
    assert bars[2][0] == pytest.approx(bars[1][0], abs=0.2)
    assert bars[3][1] / bars[0][1] == pytest.approx(0.9, abs=0.01)
    assert [node.text for node in tree.iter("text")][1::2] == [
        "97.7 KiB",
        "29.3 KiB",
        "-19.5 KiB",
        "87.9 KiB",
    ]
    assert "KV pool: 87.9 KiB (modelled)" in [node.text for node in tree.iter("title")]


def test_stacked_bars_add_up():
    tree = parse(stacked("t", [("one", [("a", 1.0), ("b", 3.0)]), ("two", [("a", 2.0), ("b", 0.0)])], "s"))
    bars = [(float(node.get("x")), float(node.get("width"))) for node in tree.iter("rect")]
    assert bars[1][0] == pytest.approx(sum(bars[0]), abs=0.2)
    assert bars[2][1] == pytest.approx(2 * bars[0][1], abs=0.2)
    assert [node.text for node in tree.iter("text")] == ["one", "4.00 s", "two", "2.00 s"]
    assert stacked("t", [("one", [("a", 0.0)])], "s") == ""


def test_the_contour_of_a_heatmap_parts_gain_from_loss():
    svg = heatmap("t", [1024, 2048, 4096], [1, 8], [[0.9, 0.99, 1.1], [0.9, 1.0, None]])
    tree = parse(svg)
    assert [node.get("class") for node in tree.iter("rect")] == [
        "loss",
        "loss",
        "gain",
        "loss",
        "gain",
        "loss",
    ]
    assert len([node for node in tree.iter("line") if node.get("class") == "contour"]) == 5
    shown = [node.text for node in tree.iter("text")]
    assert {"0.90", "1.10", "1K", "4K", "8"} <= set(shown)
    assert "batch 1, 4,096 tokens: 1.10x" in [node.text for node in tree.iter("title")]


def test_texts_are_escaped():
    hostile = "<b onclick='x'>&\"</b>"
    for svg in (
        lines(
            hostile,
            [Line(1, [1, 2], [1, 2], [(1, 1, hostile)])],
            Axis(hostile),
            Axis(hostile),
            [(1, hostile)],
        ),
        waterfall(hostile, [(hostile, 0.0, 1.0, "total", hostile)], "bytes"),
        stacked(hostile, [(hostile, [(hostile, 1.0)])], "s"),
        heatmap(hostile, [1], [1], [[1.0]]),
    ):
        assert parse(svg).get("aria-label") == hostile
        assert not list(parse(svg).iter("b"))


def test_a_log_axis_is_even_in_ratios():
    svg = lines("t", [Line(1, [1.0, 10.0, 100.0], [0, 1, 2])], Axis("x", "s", log=True), Axis("y"))
    places = [float(x) for x in re.findall(r"[ML]([0-9.]+),", parse(svg).find("path").get("d"))]
    assert places[1] - places[0] == pytest.approx(places[2] - places[1], abs=0.2)
    assert math.isclose(places[0], 64, abs_tol=0.1)
