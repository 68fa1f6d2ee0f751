"""Tables of operators from others' measurements of attention."""

import csv
import gzip
from pathlib import Path
from typing import Any

import pytest

from scripts.reproduce.vidur_search import tables


def test_a_point_that_takes_longer_than_larger_ones_is_taken_from_them() -> None:
    times = {(1.0, 10.0): 1.0, (1.0, 20.0): 9.0, (2.0, 10.0): 2.0, (2.0, 20.0): 3.0}
    assert tables.healed(times) == (times | {(1.0, 20.0): 3.0}, 1)
    # Noise of less than a tenth is not counted.
    assert tables.healed({(1.0, 1.0): 1.05, (2.0, 1.0): 1.0}) == (
        {(1.0, 1.0): 1.0, (2.0, 1.0): 1.0},
        0,
    )


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    each = {
        "kv_cache_dtype": "bfloat16",
        "attn_dtype": "bfloat16",
        "num_heads": 16,
        "num_key_value_heads": 2,
        "batch_size": 1,
    }
    with gzip.open(path, "wt", newline="") as file:
        writer = csv.DictWriter(file, [*each, "isl", "step", "latency"])
        writer.writeheader()
        writer.writerows(each | row for row in rows)
    return path


def test_a_chunk_takes_what_all_do_less_what_was_there(tmp_path: Path) -> None:
    """Times are the square of the length in units of 100 tokens."""
    lengths = [16, 100, 200, 400, 800]
    rows: list[dict[str, Any]] = [{"isl": n, "step": 0, "latency": (n / 100) ** 2} for n in lengths]
    rows += [{"isl": 100, "step": 0, "latency": 77, "batch_size": 4}]
    rows += [{"isl": 100, "step": 0, "latency": 77, "num_heads": 8}]
    rows += [{"isl": 100, "step": 0, "latency": 77, "kv_cache_dtype": "fp8"}]
    found, bad = tables.prefill(write(tmp_path / "a.csv.gz", rows), 16, 2)
    assert bad == 0
    assert found[400.0, 400.0] == pytest.approx(64 - 16)
    assert found[100.0, 100.0] == pytest.approx(4 - 1)
    assert found[100.0, 0.0] == 1.0
    assert (800.0, 16.0) not in found


def test_decodes_go_by_batch_and_context(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"isl": 1, "step": step, "batch_size": batch, "latency": batch + step}
        for batch in (1, 4)
        for step in (99, 9000)
    ]
    found, _ = tables.decode(write(tmp_path / "a.csv.gz", rows), 16, 2)
    assert found == {(1.0, 100.0): 100.0, (4.0, 100.0): 103.0}
