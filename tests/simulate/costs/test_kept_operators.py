"""Conversions of published tables, kept by content."""

import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from published_cases import make_card, wanted, write

from jaxinfer.simulate.costs import kept_operators
from jaxinfer.simulate.costs.kept_operators import Published, published_operators

ALL_REDUCES = ("x9_sxm", "comm", "trtllm", "1.2.0", "custom_allreduce_perf.parquet")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(kept_operators, "FOLDER", tmp_path / "kept")
    published_operators.cache_clear()
    return make_card(tmp_path / "t")


def times(found: Published) -> list[float]:
    """Times of all operators and attention, within the tables and beyond."""
    operators = found.operators
    sizes = (1, 3, 700, 5000)
    alone = [operators.dense[name](x) for name in sorted(operators.dense) for x in sizes]
    grids = operators.attention.grids
    alone += [grids["chunks alone"](x, x / 3, 0.0, 0.0) for x in sizes]
    return alone + [grids["decodes alone"](0.0, 0.0, x, 9 * x) for x in sizes]


def test_what_was_converted_is_read_from_arrays(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = published_operators(wanted(root, devices=2))
    published_operators.cache_clear()
    monkeypatch.setattr(kept_operators, "convert", None)  # Nothing is converted now.
    again = published_operators(wanted(root, devices=2))
    assert times(again) == times(first)
    assert again.files == first.files


def test_a_table_that_has_changed_is_converted_anew(root: Path) -> None:
    first = published_operators(wanted(root, devices=2))
    published_operators.cache_clear()
    path = root.joinpath(*ALL_REDUCES)
    write(path, [r | {"latency": 2 * r["latency"]} for r in pq.read_table(path).to_pylist()])
    os.utime(path, ns=(1, 1))
    again = published_operators(wanted(root, devices=2))
    ratio = again.operators.dense["all_reduce"](2) / first.operators.dense["all_reduce"](2)
    assert ratio == pytest.approx(2)


def test_where_nothing_can_be_kept_it_is_converted_each_time(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setattr(kept_operators, "FOLDER", tmp_path / "file" / "inside")
    first = published_operators(wanted(root))
    published_operators.cache_clear()
    assert times(published_operators(wanted(root))) == times(first)


def test_a_damaged_file_is_made_anew(root: Path, tmp_path: Path) -> None:
    first = published_operators(wanted(root))
    published_operators.cache_clear()
    (path,) = (tmp_path / "kept").glob("*.npz")
    path.write_bytes(path.read_bytes()[:100])
    assert times(published_operators(wanted(root))) == times(first)


def test_kept_operators_load_no_scipy() -> None:
    """The import takes longer than all else of a simulation's start."""
    code = "import jaxinfer.simulate.costs.kept_operators, sys; print('scipy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
