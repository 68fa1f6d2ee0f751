"""Hits of our prefix cache are those of kvcache-simulator 0.1.3, block by block, in small pools.

The file was recorded by `python -m scripts.validate.prefix_cache --record`, with its Python.
"""

import json
from pathlib import Path

import pytest

from jaxinfer.serving.prefix_cache import CachedPage, PrefixCache
from jaxinfer.workload.bench_request import BLOCK, BenchRequest
from scripts.validate.prefix_cache import by_names, compared, drawn, lines_of, spared

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "kvcache_simulator.json").read_text())
FOUND = RECORDED["found"]
SIZES = [16, 30, 50]


def differing(work: list[BenchRequest]) -> int:
    rows = compared(work, FOUND)
    return sum(row["kvcache-simulator, blocks"] != row["ours, blocks"] for row in rows)


def test_hits_are_those_of_the_reference() -> None:
    work = drawn()
    assert [list(item.hash_ids or ()) for item in work] == RECORDED["requests"]
    assert [(warm, size) for warm, size, *_ in FOUND] == [
        (warm, size) for warm in (0.25, 0.5, 0.75) for size in SIZES
    ]
    # From a third to nearly two thirds of the tokens, so that what is evicted matters.
    shares = [hits / tokens for _, _, hits, tokens in FOUND]
    assert min(shares) > 0.3
    assert max(shares) < 0.65
    assert differing(work) == 0


def test_another_order_of_recency_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """First pages dropped first: they are evicted first, and what follows them is lost."""
    drop = PrefixCache.drop

    def in_reverse(self: PrefixCache, *pages: CachedPage) -> None:
        drop(self, *reversed(pages))

    monkeypatch.setattr(PrefixCache, "drop", in_reverse)
    assert differing(drawn()) == len(FOUND)


def test_pools_without_a_limit_spare_what_names_say() -> None:
    """Prompts of whole blocks and one token: nothing of a last block or token is left to differ."""
    work = drawn()
    for instances in (1, 8):
        assert sum(spared(work, 3000, instances)) == by_names(work, instances) - repeated(
            work, instances
        )
    assert len(lines_of(work)) == len(work)


def repeated(work: list[BenchRequest], instances: int) -> int:
    """Last tokens that names count and no cache has: those of prompts that were there before."""
    seen: list[set[tuple[int, ...]]] = [set() for _ in range(instances)]
    found = 0
    for number, item in enumerate(work):
        names = item.hash_ids or ()
        found += names in seen[number % instances]
        seen[number % instances].add(names)
    assert BLOCK == 512
    return found
