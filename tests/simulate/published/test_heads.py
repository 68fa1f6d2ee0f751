"""Attention of heads that a table lacks."""

from itertools import product
from pathlib import Path

import pytest
from published_cases import decodes_ms, write

from jaxinfer.errors import JaxinferError
from jaxinfer.simulate.published.heads import read_attention

AXES = ("batch_size", "isl", "step")


def table(path: Path, heads: list[tuple[int, int]]) -> Path:
    """Times that grow with rows and entries, and a hundredth by each query head."""
    write(
        path,
        [
            {"num_heads": q, "num_key_value_heads": k, "batch_size": b, "isl": 1, "step": s,
             "latency": decodes_ms(b, 1 + s) * (1 + q / 100)}
            for (q, k), b, s in product(heads, (1, 2, 4, 8), (15, 255))
        ],
    )  # fmt: skip
    return path


def times(path: Path, queries: int, keys: int, other: bool = True) -> dict[tuple[int, ...], float]:
    only = {"num_heads": queries, "num_key_value_heads": keys}
    read = read_attention(path, AXES, only, {}, other)
    return {tuple(map(int, at)): ms for at, ms in zip(read.points, read.ms, strict=True)}


def test_heads_that_are_there_are_taken_as_they_are(tmp_path: Path) -> None:
    path = table(tmp_path / "t.parquet", [(8, 2), (16, 2), (4, 1)])
    assert times(path, 8, 2)[4, 1, 15] == pytest.approx(1.08 * decodes_ms(4, 16))


def test_half_the_heads_for_twice_the_sequences(tmp_path: Path) -> None:
    found = times(table(tmp_path / "t.parquet", [(8, 2)]), 16, 4)
    assert set(found) == {(b, 1, s) for b in (1, 2, 4) for s in (15, 255)}
    assert found[2, 1, 255] == pytest.approx(1.08 * decodes_ms(4, 256))


def test_between_the_next_numbers_of_query_heads(tmp_path: Path) -> None:
    found = times(table(tmp_path / "t.parquet", [(4, 2), (8, 2), (16, 2), (40, 2)]), 14, 2)
    assert found[8, 1, 15] == pytest.approx(1.14 * decodes_ms(8, 16))


def test_without_any_that_could_stand_for_them(tmp_path: Path) -> None:
    path = table(tmp_path / "t.parquet", [(8, 2)])
    with pytest.raises(JaxinferError, match="has neither 14 query heads with 2 KV heads, nor par"):
        times(path, 14, 2)
    with pytest.raises(JaxinferError, match="no rows with num_heads 14"):
        times(path, 14, 2, other=False)
