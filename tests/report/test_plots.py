"""Pictures: their artists, and that they end up in a file."""

from dataclasses import replace
from pathlib import Path

import matplotlib.image
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from jaxinfer import JaxinferError
from jaxinfer.report.plots import KINDS, MAX_BLOCKS, latencies, throughput_bars, timeline
from jaxinfer.report.records import RequestRecord, RunRecord, StepRecord, TransferRecord


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for box in figure.legends for text in box.get_texts()]


def lanes(figure: Figure) -> list[str]:
    return [label.get_text() for label in figure.axes[0].get_yticklabels()]


def blocks(figure: Figure) -> list[tuple[int, str, float, float, float]]:
    """Lane, kind, start, end and height of each block of a timeline."""
    kinds = {colour.lower(): kind for kind, (_, colour) in KINDS.items()}
    found = []
    for bars in figure.axes[0].collections:
        assert isinstance(bars, PolyCollection)
        for path, colour in zip(bars.get_paths(), bars.get_facecolors(), strict=True):
            (x0, y0), (x1, y1) = path.get_extents().get_points()
            row = round((y0 + y1) / 2)
            found.append((row, kinds[to_hex(colour)], float(x0), float(x1), float(y1 - y0)))
    return found


def footnote(figure: Figure) -> str:
    return figure.get_supxlabel()


def check_file(path: Path, figure: Figure) -> None:
    """A PNG of the figure's size, with a margin that nothing is cut off by, and something in it."""
    pixels = matplotlib.image.imread(path)[..., :3]
    width, height = figure.get_size_inches() * 150
    assert pixels.shape[:2] == (int(height), int(width))
    edges = [pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]]
    assert all(np.all(edge == 1) for edge in edges)
    assert np.mean(np.any(pixels < 1, axis=-1)) > 0.01


def test_timeline_has_a_lane_per_stage_and_route(small_run: RunRecord, tmp_path: Path) -> None:
    figure = timeline(small_run, tmp_path / "t.png")
    check_file(tmp_path / "t.png", figure)
    # By group, and the route above the first stage of the instance that it goes to.
    assert lanes(figure) == [
        "low: a",
        "a \N{RIGHTWARDS ARROW} b",
        "low: b, stage 1",
        "high: b, stage 2",
    ]
    found = blocks(figure)
    assert [block[:4] for block in found if block[0] != 1] == [
        (0, "prefill", 0, 2),
        (0, "prefill", 4, 5),
        (2, "mixed", 1, 3),
        (2, "decode", 3, 4.5),
        (3, "mixed", 3, 6),
        (3, "decode", 6, 7),
    ]
    # Two transfers at once share the lane's height.
    transfers = [block for block in found if block[0] == 1]
    assert [block[1:4] for block in transfers] == [("transfer", 2.25, 2.75), ("transfer", 2.5, 3.5)]
    assert [block[4] for block in transfers] == pytest.approx([found[0][4] / 2] * 2)
    assert legend(figure) == ["prefill", "prefill chunk and decodes", "decodes", "KV transfer"]
    (axes,) = figure.axes
    assert axes.get_xlabel() == "time since the start of the run (s)"
    assert axes.get_title("left") == "small: 0.00 to 10.00 s of 10.00 s"
    assert footnote(figure) == ""


def test_lanes_go_by_groups_as_instances_name_them(small_run: RunRecord, tmp_path: Path) -> None:
    """A group's lanes stand together, in the order of its instances, whatever the names."""
    groups = {"z": ("w",), "b": ("a", "w"), "a": ("w",), "y": ("a",)}
    run = replace(small_run, groups=groups, steps=(), transfers=())
    assert lanes(timeline(run, tmp_path / "t.png")) == [
        "w: z",
        "w: b, stage 2",
        "w: a",
        "a: b, stage 1",
        "a: y",
    ]


def test_a_stage_of_segments_has_a_lane_for_each(small_run: RunRecord, tmp_path: Path) -> None:
    """A real run times each segment, a simulation the stage as a whole."""
    groups = {"a": ("w", "w"), "b": ("w", "w", "z", "z"), "c": ("z",)}
    stages = [{"group": "w"}, {"group": "z"}]
    files = {"a": {"segments": 2}, "b": {"segments": 2, "stages": stages}, "c": {"segments": 2}}
    run = {"run_file": {"instances": files}}
    record = replace(small_run, groups=groups, steps=(), transfers=(), run=run)
    assert lanes(timeline(record, tmp_path / "t.png")) == [
        "w: a, segment 1",
        "w: a, segment 2",
        "w: b, stage 1, segment 1",
        "w: b, stage 1, segment 2",
        "z: b, stage 2, segment 1",
        "z: b, stage 2, segment 2",
        "z: c",
    ]


def test_timeline_shows_the_window_alone(small_run: RunRecord, tmp_path: Path) -> None:
    figure = timeline(small_run, tmp_path / "t.png", start=3.75, stop=5.5)
    assert figure.axes[0].get_xlim() == (3.75, 5.5)
    assert [block[:2] for block in blocks(figure)] == [(0, "prefill"), (2, "decode"), (3, "mixed")]
    assert "KV transfer" not in legend(figure)
    with pytest.raises(JaxinferError, match="timeline of small: from 5 to 5 s is no time"):
        timeline(small_run, tmp_path / "no.png", start=5, stop=5)
    assert not (tmp_path / "no.png").exists()


def test_default_window_is_short_enough_for_its_steps(small_run: RunRecord, tmp_path: Path) -> None:
    def window(length: float, gap: float) -> tuple[float, float]:
        times = [3 + i * (length + gap) for i in range(1000)]
        steps = tuple(StepRecord("a", ((t, t + length),), 0, 1) for t in times)
        run = replace(small_run, wall_s=5000, steps=steps, transfers=())
        return timeline(run, tmp_path / "t.png").axes[0].get_xlim()

    assert window(0.5, 0.5) == pytest.approx((3, 15))
    assert window(0.01, 0.01) == pytest.approx((3, 3 + MAX_BLOCKS * 0.02 - 0.01))
    assert timeline(replace(small_run, wall_s=8), tmp_path / "t.png").axes[0].get_xlim() == (0, 8)


def test_latencies_are_those_of_the_median_round(small_run: RunRecord, tmp_path: Path) -> None:
    late = RequestRecord("late", 0.0, 10, (90.0, 91.0), 0, 0, None)
    slow = replace(small_run, wall_s=1000, requests=(late,))
    figure = latencies({"x": [slow, small_run, small_run], "y": [small_run]}, tmp_path / "l.png")
    check_file(tmp_path / "l.png", figure)
    left, right = figure.axes
    assert [len(left.lines), len(right.lines)] == [2, 2]
    times, shares = left.lines[0].get_data()
    # TTFT 1, 1 and 5 seconds, from nothing to all.
    assert list(times) == [1, 1, 1, 5]
    assert list(shares) == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert list(right.lines[0].get_xdata())[1:] == [0.5, 1, 2]
    assert left.get_xlabel() == "time to first token (TTFT, s)"
    assert right.get_xlabel() == "time between tokens (TBT, s)"
    assert (left.get_ylabel(), right.get_ylabel()) == ("share of requests", "share of gaps")
    assert legend(figure) == ["x", "y"]
    looks = {(line.get_color(), line.get_linestyle()) for line in left.lines}
    assert len(looks) == 2


@pytest.mark.parametrize(("last", "scale"), [(30.0, "linear"), (31.0, "log")])
def test_a_wide_range_is_logarithmic(
    small_run: RunRecord, tmp_path: Path, last: float, scale: str
) -> None:
    # A gap of nothing has no place on a logarithmic axis and does not count.
    times = (0.0, 0.0, 1.0, 1.0 + last)
    run = replace(small_run, requests=(RequestRecord("r", 0.0, 10, times, 0, 0, None),))
    figure = latencies({"x": [run]}, tmp_path / "l.png")
    assert [axes.get_xscale() for axes in figure.axes] == ["linear", scale]


def test_a_panel_without_values_says_so(small_run: RunRecord, tmp_path: Path) -> None:
    run = replace(small_run, requests=small_run.requests[3:])
    left, right = latencies({"x": [run]}, tmp_path / "l.png").axes
    assert [text.get_text() for text in right.texts] == ["no values"]
    assert not left.texts


def test_bars_are_medians_and_dots_are_rounds(small_run: RunRecord, tmp_path: Path) -> None:
    rounds = [replace(small_run, wall_s=wall) for wall in (10, 30, 20)]
    name = "a system whose name is too long for a line"
    figure = throughput_bars({name: rounds, "y": [small_run]}, tmp_path / "b.png")
    check_file(tmp_path / "b.png", figure)
    (axes,) = figure.axes
    widths = [patch.get_width() for patch in axes.patches]  # type: ignore[attr-defined]
    assert widths == pytest.approx([0.15, 0.3])
    assert list(axes.lines[0].get_xdata()) == pytest.approx([0.3, 0.1, 0.15])
    assert list(axes.lines[1].get_xdata()) == pytest.approx([0.3])
    # The medians are a column beside all bars and dots, under a heading; the first is at the top.
    assert [text.get_text() for text in axes.texts] == ["0.150", "0.300", "median"]
    boxes = [text.get_window_extent() for text in axes.texts]
    assert min(box.x0 for box in boxes) > axes.get_window_extent().x1
    heights = [axes.transData.inverted().transform((0, (b.y0 + b.y1) / 2))[1] for b in boxes]
    assert heights[:2] == pytest.approx([0, 1], abs=0.1)
    assert heights[2] < -0.5
    assert axes.get_xlim() == pytest.approx((0, 1.04 * 0.3))
    assert axes.get_ylim() == (1.5, -0.5)
    # Three rounds are spread over 0.36 of the bar's height, one is in its middle.
    assert list(axes.lines[0].get_ydata()) == pytest.approx([-0.12, 0, 0.12])
    assert list(axes.lines[1].get_ydata()) == pytest.approx([1])
    assert lanes(figure) == ["a system whose name is too\nlong for a line", "y"]
    assert axes.get_xlabel() == "throughput (finished requests/s)"
    assert legend(figure) == ["median of the rounds", "one round"]


def test_one_round_has_no_median(small_run: RunRecord, tmp_path: Path) -> None:
    figure = throughput_bars({"x": [small_run], "y": [small_run]}, tmp_path / "b.png")
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.texts] == ["0.300", "0.300"]
    assert not axes.lines
    assert not figure.legends


def test_a_simulated_run_is_not_called_emulated(small_run: RunRecord, tmp_path: Path) -> None:
    run = replace(small_run, emulated=("simulated on g (A10)",))
    assert footnote(throughput_bars({"x": [run]}, tmp_path / "b.png")) == "simulated on g (A10)"
    slow = replace(small_run, emulated=("low: 3 times slower",))
    figure = throughput_bars({"x": [run], "y": [slow]}, tmp_path / "b.png")
    assert footnote(figure) == "x, simulated on g (A10)\ny, emulated: low: 3 times slower"


def test_footnotes_say_what_was_emulated(small_run: RunRecord, tmp_path: Path) -> None:
    run = replace(small_run, emulated=("low: 3 times slower", "link: " + "long " * 40))
    runs = {"x": [run]}
    figures = [
        timeline(run, tmp_path / "0.png"),
        latencies(runs, tmp_path / "1.png"),
        throughput_bars(runs, tmp_path / "2.png"),
    ]
    for number, figure in enumerate(figures):
        assert footnote(figure).startswith("emulated: low: 3 times slower; link: long")
        assert footnote(figure).count("\n") == 1
        check_file(tmp_path / f"{number}.png", figure)


def test_many_systems_and_long_names_are_not_cut_off(small_run: RunRecord, tmp_path: Path) -> None:
    runs = {f"a display name that is long, number {i}": [small_run] for i in range(9)}
    figure = latencies(runs, tmp_path / "l.png")
    check_file(tmp_path / "l.png", figure)
    left, right = figure.axes
    labels = [label.get_text().replace("\n", " ") for label in left.get_yticklabels()]
    assert labels == list(runs)
    # TTFT of 1, 1 and 5 seconds.
    assert list(left.lines[0].get_xdata()) == pytest.approx([1, 4.2, 4.92])
    assert right.get_xlabel() == "TBT: p50, p90, p99 (s)"
    assert legend(figure) == ["p50", "p90", "p99"]


def test_other_figures_are_left_alone(small_run: RunRecord, tmp_path: Path) -> None:
    timeline(small_run, tmp_path / "t.png")
    assert plt.get_fignums() == []


def test_an_idle_run_can_be_drawn(small_run: RunRecord, tmp_path: Path) -> None:
    run = replace(small_run, steps=(), transfers=(), requests=())
    figure = timeline(run, tmp_path / "t.png")
    assert blocks(figure) == []
    assert throughput_bars({"x": [run]}, tmp_path / "b.png").axes[0].get_xlim() == (0, 1)
    assert len(latencies({"x": [run]}, tmp_path / "l.png").axes) == 2


def test_a_transfer_from_elsewhere_is_not_lost(small_run: RunRecord, tmp_path: Path) -> None:
    back = TransferRecord("r0", "b", "a", 1, 1, 1.0, 1.0, 2.0, 0.0)
    run = replace(small_run, transfers=(*small_run.transfers, back))
    assert lanes(timeline(run, tmp_path / "t.png"))[0] == "b \N{RIGHTWARDS ARROW} a"


def test_what_failed_is_not_in_the_distributions(small_run: RunRecord, tmp_path: Path) -> None:
    """Nor are the other continuations of its prompt."""
    first, *rest = small_run.requests
    failed = replace(first, error="lost", parent="p")
    run = replace(small_run, requests=(failed, *rest[:2], replace(rest[2], parent="p")))
    ttft, tbt = latencies({"x": [run]}, tmp_path / "l.png").axes
    for axes, value in ((ttft, 1.0), (tbt, 0.5)):
        (line,) = axes.lines
        assert {x for x in np.asarray(line.get_xdata()) if np.isfinite(x)} == {value}
