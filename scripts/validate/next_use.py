"""Tokens that prefix caches spare by each order of eviction, beside Belady's bound.

    python -m scripts.validate.next_use TRACE.jsonl

The trace has Mooncake's form, prompts by named blocks of 512 tokens. Requests are served one by one
in the trace's order, and all are known beforehand. The bound counts blocks alone: before each
access it keeps the blocks whose next uses come first, also where a request has no room for all of
its blocks, and counts a block whether or not those before it are there. No cache has more hits.
"""

import heapq
import math
from collections.abc import Sequence
from pathlib import Path

import click

from jaxinfer.workload.bench_request import BLOCK, BenchRequest
from jaxinfer.workload.lengths import read_workload
from scripts.tables import Row, show_table
from scripts.validate.prefix_cache import POOLS, spared, whole_blocks


def chains(work: Sequence[BenchRequest]) -> list[list[int]]:
    """Return each prompt's blocks by numbers; equal ones have the same tokens before them, too.

    Prompts are those of ``whole_blocks``, whose last name is that of one token.
    """
    numbers: dict[tuple[int, int], int] = {}
    found = []
    for item in work:
        number, chain = 0, []
        for name in (item.hash_ids or ())[:-1]:
            number = numbers.setdefault((number, name), len(numbers) + 1)
            chain.append(number)
        found.append(chain)
    return found


def belady(prompts: Sequence[Sequence[int]], capacity: int) -> int:
    """Return the most hits that a cache of ``capacity`` blocks can have."""
    accesses = [block for chain in prompts for block in chain]
    following, last = [math.inf] * len(accesses), dict[int, int]()
    for index in range(len(accesses) - 1, -1, -1):
        following[index] = last.get(accesses[index], math.inf)
        last[accesses[index]] = index
    cached: dict[int, float] = {}
    farthest: list[tuple[float, int]] = []
    hits = 0
    for block, needed in zip(accesses, following, strict=True):
        hits += block in cached
        cached[block] = needed
        heapq.heappush(farthest, (-needed, block))
        while len(cached) > capacity:
            time, other = heapq.heappop(farthest)
            if cached.get(other) == -time:
                del cached[other]
    return hits


def compared(work: Sequence[BenchRequest], pools: Sequence[int]) -> list[Row]:
    """Return a row for each pool: hits by each order of eviction, and the bound."""
    rows = []
    for pool in pools:
        most = belady(chains(work), pool)
        hits = {
            order: sum(spared(work, pool, order=order)) // BLOCK for order in ("lru", "next_use")
        }
        share = {f"{order} / bound": f"{each / most:.3f}" for order, each in hits.items()}
        rows.append({"blocks": pool, **hits, "bound": most, **share})
    return rows


@click.command()
@click.argument("trace", type=click.Path(path_type=Path, exists=True))
@click.option("--limit", type=click.IntRange(1), help="Use only this many requests.")
@click.option("--pools", default=",".join(map(str, POOLS)), help="Numbers of blocks of a pool.")
def main(trace: Path, limit: int | None, pools: str) -> None:
    """Print the hits of each order of eviction."""
    work = whole_blocks(read_workload(trace, limit))
    show_table(compared(work, [int(each) for each in pools.split(",")]))


if __name__ == "__main__":
    main()
