"""Parts of a sweep: its axes, its figures, its pictures."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from jaxinfer import JaxinferError
from jaxinfer.config.run_file import as_run_file
from jaxinfer.files.kept import KeptResults
from jaxinfer.lab.plan.sweep.pictures import axis_words, draw, figure_words
from jaxinfer.lab.plan.sweep.sweep import (
    PointRun,
    check,
    clusters,
    figures_of,
    half_interval,
    run_point,
    seeded,
    simulate_point,
    sweep_rows,
)
from jaxinfer.lab.plan.sweep.sweep_file import FIGURES, Sweep, x_axis
from jaxinfer.workload.synthetic import Synthetic


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    paths = [tmp_path / f"{name}.yaml" for name in "ab"]
    for path in paths:
        path.write_text(yaml.safe_dump({"engine": {"max_num_seqs": 4}}))
    return [str(path) for path in paths]


def sweep(own: dict[str, dict[str, Any]], **more: Any) -> Sweep:
    return Sweep.model_validate({"files": own, **more})


def test_a_figure_that_there_is_none_of(files: list[str]) -> None:
    with pytest.raises(JaxinferError, match=r"^y: no figure 'ttft_p98'"):
        sweep({files[0]: {}}, y=["ttft_p98"])


def test_the_axis_of_the_pictures(files: list[str]) -> None:
    a, b = files
    axes = {"engine.seed": [1, 2], "engine.page_size": [16, 32], "model": ["x"]}
    assert x_axis(sweep({a: {}, b: {}}, axes=axes)) == "engine.page_size"
    assert x_axis(sweep({a: {}, b: {}}, axes=axes, x="engine.seed")) == "engine.seed"
    assert x_axis(sweep({a: {}}, axes={"strict_shapes": [True, False]})) is None
    # A file's own values count, not those that they replace.
    words = {"engine.page_size": ["a"]}
    assert x_axis(sweep({a: {}, b: words}, axes=axes)) == "engine.seed"
    assert x_axis(sweep({a: {"engine.page_size": [1]}}, axes={**axes, **words})) == (
        "engine.page_size"
    )
    each = {a: {"engine.seed": [1]}, b: {"engine.seed": [2]}}
    assert x_axis(sweep(each, x="engine.seed")) == "engine.seed"
    with pytest.raises(JaxinferError, match=r"x is engine\.seed, whose values are"):
        sweep({a: {"engine.seed": ["a"]}, b: {}}, axes=axes, x="engine.seed")
    with pytest.raises(JaxinferError, match=r"x is engine\.seed, must be one of axes"):
        sweep({a: {}, b: {"engine.seed": [1]}}, x="engine.seed")


def test_figures_of_a_run() -> None:
    names = {name: number for number, name in enumerate(FIGURES[1:])}
    metrics: Any = SimpleNamespace(**names | {"requests": 10, "failed": 4, "wall_s": 2.0})
    found = figures_of(metrics)
    assert found["requests_s"] == 3.0
    assert set(found) == set(FIGURES)
    assert found | {"requests_s": 0} == found | vars(metrics) | {"requests_s": 0}
    metrics.wall_s = 0.0
    assert figures_of(metrics)["requests_s"] is None


def test_points_are_known_by_what_they_run_and_how(files: list[str], tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = []
    seen: list[str] = []

    def one(point: PointRun) -> dict[str, Any]:
        asked.append(dict(point.data))
        seed = point.data["engine"]["seed"]
        return {"refused": "no"} if seed == 3 else {"x": seed}

    def other(point: PointRun) -> dict[str, Any]:
        return one(point)

    a, _ = files
    trace = tmp_path / "trace.csv"
    trace.write_text("1")
    grid = sweep({a: {"engine.seed": [1, 2, 3]}}, run={"workload": {"trace": str(trace)}})
    kept = KeptResults()

    def rows(call: Any) -> int:
        asked.clear()
        found = sweep_rows(grid, kept, map, call, lambda point, figures: seen.append(str(point)))
        assert [row.get("x") for row in found] == [1, 2, None]
        return len(asked)

    assert rows(one) == 3
    assert len(seen) == 3
    # But for what cannot be: that may be mended elsewhere.
    assert rows(one) == 1
    assert rows(other) == 3
    trace.write_text("2")
    assert rows(one) == 3
    assert asked[0]["engine"] == {"max_num_seqs": 4, "seed": 1}


def test_the_axes_win_over_what_all_have_in_common(files: list[str]) -> None:
    grid = sweep({files[0]: {"engine.seed": [1]}}, run={"engine": {"seed": 9, "page_size": 32}})
    (point,) = grid.candidates()
    assert grid.data(point)["engine"] == {"seed": 1, "page_size": 32, "max_num_seqs": 4}


def test_a_list_of_points_and_its_picture(
    files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Points go with all combinations of the axes."""
    a, b = files
    points = [{"engine.page_size": 16, "engine.seed": 3}, {"engine.page_size": 32}]
    grid = sweep({a: {}, b: {"engine.max_num_seqs": [8, 9]}}, points=points, y=["ttft_p99"])
    found = list(grid.candidates())
    sizes = [grid.data(point)["engine"].get("page_size") for point in found]
    assert sizes == [16, 32, 16, 16, 32, 32]
    assert [point.axes.get("engine.seed") for point in found] == [3, None, 3, 3, None, None]
    # Of what all points have, the last with numbers; those of a file alone are of no picture.
    assert x_axis(grid) == "engine.page_size"
    rows = [{**point.axes, "ttft_p99": 1.0 + i} for i, point in enumerate(found)]
    (axes,) = drawn(monkeypatch, grid, rows)
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert lines["b, requests in a step, at most: 9"] == [[32, 6.0]]
    assert lines["b, seed: 3, requests in a step, at most: 9"] == [[16, 4.0]]
    for wrong, says in (
        ({"points": []}, "points"),
        ({"axes": {"engine.seed": [1]}}, r"^points: engine\.seed is an axis, too"),
    ):
        with pytest.raises(JaxinferError, match=says):
            sweep({a: {}}, **({"points": points} | wrong))
    with pytest.raises(JaxinferError, match=r"^points: 'engine\.seed\.x': engine\.seed is "):
        list(sweep({a: {}}, points=[{"engine.seed": 1, "engine.seed.x": 2}]).candidates())


def test_a_point_that_cannot_be_says_why(files: list[str]) -> None:
    grid = sweep({files[0]: {"engine.max_num_seqs": [4, "x", 8]}})
    found = [simulate_point(PointRun(grid.data(point))) for point in grid.candidates()]
    assert "engine.max_num_seqs is 'x'" in found[1]["refused"]
    assert "no trace" in found[0]["refused"]
    assert run_point(PointRun(grid.data([*grid.candidates()][1]))) == found[1]
    seqs = [next(iter(each.instances.values())).max_num_seqs for each in clusters(grid)]
    assert seqs == [4, 8]


def drawn(monkeypatch: pytest.MonkeyPatch, grid: Sweep, rows: list[dict[str, Any]]) -> list[Any]:
    """The axes of each picture."""
    found: list[Any] = []
    monkeypatch.setattr(
        "jaxinfer.lab.plan.sweep.pictures.save_picture",
        lambda figure, path: found.extend(figure.axes),
    )
    written, _ = draw(Path(), "svg", grid, rows)
    assert [path.suffix for path in written] == [".svg"] * len(found)
    return found


def test_a_line_for_each_file_and_its_other_axes(
    files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = files
    grid = sweep(
        {a: {"engine.seed": [0, 1]}, b: {}},
        axes={"engine.page_size": [32, 16]},
        y=["ttft_p99", "requests_s", "tpot_p50"],
    )
    axes = [point.axes for point in grid.candidates()]
    rows = [{**each, "ttft_p99": 1.0 + i, "requests_s": 0.0} for i, each in enumerate(axes)]
    rows[0] |= {"ttft_p99": None}
    first, second = drawn(monkeypatch, grid, rows)  # Of tpot_p50 there is nothing.
    lines = {line.get_label(): line.get_xydata().tolist() for line in first.lines}
    assert lines == {
        "a, seed: 0": [[16, 3.0]],
        "a, seed: 1": [[16, 4.0], [32, 2.0]],
        "b": [[16, 6.0], [32, 5.0]],
    }
    assert first.get_xlabel() == "tokens of a page"
    assert first.get_ylabel() == "time to first token (TTFT), 99th percentile (s)"
    assert second.get_ylabel() == "finished requests per second"
    assert {line.get_label() for line in second.lines} == {"a, seed: 0", "a, seed: 1", "b"}
    assert first.get_yscale() == second.get_yscale() == "linear"
    assert first.get_ylim() == (0, pytest.approx(1.06 * 6))
    # A line along the axis lies over it.
    assert second.get_ylim() == (0, 1)
    spine = max(each.get_zorder() for each in second.spines.values())
    assert all(line.get_zorder() > spine and not line.get_clip_on() for line in second.lines)


@pytest.mark.parametrize(
    ("values", "scale"), [([1.0, 31.0], "log"), ([1.0, 30.0], "linear"), ([0.0, 31.0], "linear")]
)
def test_an_overload_does_not_hide_the_rest(
    values: list[float], scale: str, files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = sweep({files[0]: {"engine.seed": [0, 1]}}, x="engine.seed", y=["ttft_p99"])
    rows = [
        {**point.axes, "ttft_p99": value}
        for point, value in zip(grid.candidates(), values, strict=True)
    ]
    (axes,) = drawn(monkeypatch, grid, rows)
    assert axes.get_yscale() == scale


@pytest.mark.parametrize(("values", "low"), [([2.0, 3.0], 0.0), ([1.0, 40.0], 0.5)])
def test_intervals_of_seeds_end_at_the_axis(
    values: list[float], low: float, files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    axes_of = {files[0]: {"engine.page_size": [16, 32]}}
    grid = sweep(axes_of, x="engine.page_size", y=["ttft_p99"], seeds=[4, 5])
    rows = [
        {**point.axes, "ttft_p99": value, "ttft_p99_ci95": 2.5}
        for point, value in zip(grid.candidates(), values, strict=True)
    ]
    (axes,) = drawn(monkeypatch, grid, rows)
    (bars,) = axes.containers
    ends = [[y for _, y in segment] for segment in bars[2][0].get_segments()]
    assert ends == [[max(value - 2.5, low), value + 2.5] for value in values]
    assert axes.get_ylim()[0] == low
    assert axes.get_ylim()[1] > values[1] + 2.5
    assert "mean of 2 seeds, bars: 95 % interval" in axes.get_xlabel()


def test_half_of_an_interval() -> None:
    """Student's t of one and of four degrees of freedom: 12.7062 and 2.7764."""
    assert half_interval([1.0]) is None
    assert half_interval([1.0, 3.0]) == pytest.approx(12.7062 * 1.0, rel=1e-5)
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert half_interval(values) == pytest.approx(2.77645 * (2.5 / 5) ** 0.5, rel=1e-5)


def test_figures_in_words() -> None:
    """Figures have words of their own, with no underscore left."""
    words = [figure_words(name) for name in FIGURES]
    assert len(set(words)) == len(words)
    assert not any("_" in each for each in words)
    assert figure_words("e2e_p50") == "time from arrival to end, median (s)"
    assert figure_words("output_tok_s") == "output (tokens/s)"
    assert figure_words("steady_requests_s") == "steady (requests/s)"
    assert figure_words("wall_s") == "time of the run (s)"
    assert axis_words("workload.arrivals.rate") == "arrivals (requests/s)"
    assert axis_words("simulate.groups.high.flops") == "flops"


def test_seeds_that_change_nothing_are_refused(files: list[str], tmp_path: Path) -> None:
    run_file = tmp_path / "run.yaml"
    run_file.write_text(yaml.safe_dump({"groups": {"g": {"kind": "A10"}}}))
    (tmp_path / "work.csv").write_text("num_prefill_tokens,num_decode_tokens\n9,5\n8,5\n")
    run: dict[str, Any] = {
        "model": "llama-3-8b",
        "engine": {"max_model_len": 64},
        "instances": {"i": {"group": "g"}},
        "workload": {"trace": str(tmp_path / "work.csv")},
    }
    fixed = {str(run_file): {"engine.max_num_seqs": [4]}}
    with pytest.raises(JaxinferError, match=r"^seeds: no point's workload .* gamma or ramp, or a"):
        check(sweep(fixed, run=run, seeds=2), real=False)
    check(sweep(fixed, run=run), real=False)
    # A later point's arrivals, or a predictor, are drawn.
    arrivals = {"workload.arrivals": ["at_once", {"kind": "poisson", "rate": 1.0}]}
    check(sweep({str(run_file): arrivals}, run=run, seeds=2), real=False)
    run["workload"]["predictor"] = {"granularity": 4, "accuracy": 0.5}
    check(sweep(fixed, run=run, seeds=2), real=False)
    run["workload"]["predictor"]["accuracy"] = 1.0
    with pytest.raises(JaxinferError, match=r"^seeds: no point's workload"):
        check(sweep(fixed, run=run, seeds=2), real=False)


RAMP = {"kind": "ramp", "from": 1.0, "to": 2.0, "over": 9.0}


@pytest.mark.parametrize(
    ("arrivals", "drawn"),
    [
        (None, False),
        ("at_once", False),
        ("trace", False),
        ({"kind": "interval", "seconds": 2.0}, False),
        ({"kind": "closed", "concurrency": 2}, False),
        ({**RAMP, "spacing": "even"}, False),
        (RAMP, True),
        ({"kind": "poisson", "rate": 1.0}, True),
        ({"kind": "gamma", "rate": 1.0, "cv": 2.0}, True),
    ],
)
def test_a_run_file_with_a_seed_is_one(arrivals: Any, drawn: bool) -> None:
    """The result is a run file as in ``run.json``, with the seed in each part that is drawn."""
    lengths: dict[str, Any] = {
        "input_len": {"kind": "uniform", "min": 1, "max": 9},
        "output_len": 3,
    }
    predictor = {"granularity": 4, "accuracy": 0.5}
    given = {"synthetic": lengths, "predictor": predictor}
    config = as_run_file({"workload": given | ({"arrivals": arrivals} if arrivals else {})})
    found = seeded(config, 7)
    assert as_run_file(found.model_dump(mode="json", exclude_unset=True)) == found
    names = {"synthetic", "predictor", *(["arrivals"] if drawn else [])}
    seeds = {
        name: getattr(found.workload, name).seed for name in ("synthetic", "predictor", "arrivals")
    }
    assert seeds == {name: 7 if name in names else 0 for name in seeds}
    assert seeded(config, None) == config


def test_lengths_that_are_numbers_are_not_drawn() -> None:
    numbers: dict[str, Any] = {"input_len": 5, "output_len": 3}
    found = [
        Synthetic.model_validate(given).is_drawn
        for given in (numbers, numbers | {"range_ratio": 0.5}, {"lengths": "azure_code"})
    ]
    assert found == [False, True, True]
