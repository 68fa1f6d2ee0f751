"""What a sweep is made of: its axes, its figures, its pictures."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from jaxinfer import JaxinferError
from jaxinfer.plan.kept import Kept
from jaxinfer.plan.sweep import (
    FIGURES,
    Sweep,
    clusters,
    draw,
    figures_of,
    run_point,
    simulate_point,
    sweep_rows,
    x_axis,
)


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

    def one(data: dict[str, Any]) -> dict[str, Any]:
        asked.append(data)
        seed = data["engine"]["seed"]
        return {"refused": "no"} if seed == 3 else {"x": seed}

    def other(data: dict[str, Any]) -> dict[str, Any]:
        return one(data)

    a, _ = files
    trace = tmp_path / "trace.csv"
    trace.write_text("1")
    grid = sweep({a: {"engine.seed": [1, 2, 3]}}, run={"workload": {"trace": str(trace)}})
    kept = Kept()

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
    """Each with all combinations of the axes."""
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
    assert lines["b, 9"] == [[32, 6.0]]
    assert lines["b, 3, 9"] == [[16, 4.0]]
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
    found = [simulate_point(grid.data(point)) for point in grid.candidates()]
    assert "engine.max_num_seqs is 'x'" in found[1]["refused"]
    assert "no trace" in found[0]["refused"]
    assert run_point(grid.data([*grid.candidates()][1])) == found[1]
    seqs = [next(iter(each.instances.values())).max_num_seqs for each in clusters(grid)]
    assert seqs == [4, 8]


def drawn(monkeypatch: pytest.MonkeyPatch, grid: Sweep, rows: list[dict[str, Any]]) -> list[Any]:
    """The axes of each picture."""
    found: list[Any] = []
    monkeypatch.setattr(
        "jaxinfer.plan.sweep.save_picture", lambda figure, path: found.extend(figure.axes)
    )
    written = draw(Path(), "svg", grid, rows)
    assert [path.suffix for path in written] == [".svg"] * len(found)
    return found


def test_a_line_for_each_file_and_its_other_axes(
    files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = files
    grid = sweep(
        {a: {"engine.seed": [0, 1]}, b: {}}, axes={"engine.page_size": [32, 16]},
        y=["ttft_p99", "requests_s", "tpot_p50"],
    )  # fmt: skip
    axes = [point.axes for point in grid.candidates()]
    rows = [{**each, "ttft_p99": 1.0 + i, "requests_s": 0.0} for i, each in enumerate(axes)]
    rows[0] |= {"ttft_p99": None}
    first, second = drawn(monkeypatch, grid, rows)  # Of tpot_p50 there is nothing.
    lines = {line.get_label(): line.get_xydata().tolist() for line in first.lines}
    assert lines == {
        "a, 0": [[16, 3.0]],
        "a, 1": [[16, 4.0], [32, 2.0]],
        "b": [[16, 6.0], [32, 5.0]],
    }
    assert (first.get_xlabel(), first.get_ylabel()) == ("engine.page_size", "ttft_p99, s")
    assert second.get_ylabel() == "requests_s"
    assert {line.get_label() for line in second.lines} == {"a, 0", "a, 1", "b"}
    assert first.get_yscale() == second.get_yscale() == "linear"
    assert first.get_ylim()[0] == 0


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
