"""Batches in the order of their prefixes: what is computed, beside the least that could be."""

import json
import random
from collections.abc import Sequence
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from jaxinfer import JaxinferError
from jaxinfer.config.run_file import as_run_file
from jaxinfer.simulate.run import simulate
from jaxinfer.workload.blend import Sized
from jaxinfer.workload.order import in_order

PAGE = 4


def computed(path: Path, order: str, admit: str = "greedy", **engine: int) -> int:
    """Prompt tokens that a simulation computes."""
    config = as_run_file(
        {
            "model": "llama-3-8b",
            "engine": {
                "page_size": PAGE,
                "max_num_seqs": 4,
                "num_pages": 60,
                "max_num_batched_tokens": 32,
                "max_model_len": 128,
                "policies": {"admit": admit},
                **engine,
            },
            "groups": {"g": {"kind": "A100-80G-SXM"}},
            "instances": {"a": {"group": "g"}},
            "workload": {"trace": str(path), "order": order},
        }
    )
    found = simulate(config, config.requests())
    return found.prompt_tokens - found.cached_tokens


def write(path: Path, prompts: Sequence[Sequence[int]], output: int = 3) -> Path:
    rows = [{"prompt_token_ids": list(tokens), "max_tokens": output} for tokens in prompts]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def least(prompts: Sequence[Sequence[int]]) -> int:
    """Each distinct full page once, but the last token of each prompt, and what fills no page."""
    pages, rest = set(), 0
    for tokens in prompts:
        full = (len(tokens) - 1) // PAGE * PAGE
        pages |= {tuple(tokens[:end]) for end in range(PAGE, full + 1, PAGE)}
        rest += len(tokens) - full
    return PAGE * len(pages) + rest


def questions(rng: random.Random, contexts: int, count: int) -> list[list[int]]:
    """Questions after one of some contexts, in random order."""
    shared = [[rng.randrange(900) for _ in range(rng.randrange(20, 60))] for _ in range(contexts)]
    own = ([rng.randrange(900) for _ in range(rng.randrange(1, 9))] for _ in range(count))
    return [[*rng.choice(shared), *each] for each in own]


@pytest.mark.parametrize("seed", range(4))
def test_each_prefix_is_computed_once(tmp_path: Path, seed: int) -> None:
    """The pool holds a few requests; in the order given, contexts are computed again."""
    prompts = questions(random.Random(seed), 8, 80)
    path = write(tmp_path / "prompts.jsonl", prompts)
    bound = least(prompts)
    ordered = computed(path, "prefix_tree", "once_per_prefix")
    assert ordered == bound
    assert bound < computed(path, "prefix_tree") < computed(path, "given")
    assert computed(path, "given", "once_per_prefix") >= bound


def test_requests_that_come_together_share_by_waiting(tmp_path: Path) -> None:
    """Four equal prompts of 29 tokens: 28 are shared, and the last one is each one's own."""
    path = write(tmp_path / "equal.jsonl", [list(range(29))] * 4)
    assert computed(path, "given", "once_per_prefix") == 29 + 3
    assert computed(path, "given") > 29 + 3


Cached = tuple[tuple[int, ...], ...]


class Pool:
    """Pages for one prompt at a time; of those that it does not need, the oldest are dropped.

    A prompt's pages count as used from the last to the first. Its last token is always computed.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], num_pages: int) -> None:
        self._num_pages, self._lengths = num_pages, [len(tokens) for tokens in prompts]
        ends = [range(PAGE, length + 1, PAGE) for length in self._lengths]
        self._keys = [
            [tuple(tokens[:end]) for end in each]
            for tokens, each in zip(prompts, ends, strict=True)
        ]

    def serve(self, number: int, cached: Cached) -> tuple[int, Cached]:
        """Return the tokens that are computed, and the pages that are kept, the oldest first."""
        length, keys = self._lengths[number], self._keys[number]
        usable = keys[: (length - 1) // PAGE]
        hits = next((i for i, key in enumerate(usable) if key not in cached), len(usable))
        idle = [key for key in cached if key not in usable[:hits]]
        lacking = -(-length // PAGE) - hits - (self._num_pages - len(cached))
        idle = idle[max(lacking, 0) :]
        used = tuple(key for key in reversed(keys) if key not in idle)
        return length - hits * PAGE, (*idle, *used)

    def computed(self, order: Sequence[int]) -> int:
        """Return the tokens that are computed in this order."""
        total, cached = 0, Cached()
        for number in order:
            tokens, cached = self.serve(number, cached)
            total += tokens
        return total

    def least(self) -> int:
        """Return the fewest tokens of all orders; orders that leave the same are tried once."""

        @cache
        def of(left: frozenset[int], cached: Cached) -> int:
            tries = ((left - {number}, *self.serve(number, cached)) for number in left)
            return min((tokens + of(rest, after) for rest, tokens, after in tries), default=0)

        return of(frozenset(range(len(self._lengths))), Cached())


def tree_of(rng: random.Random, count: int) -> list[list[int]]:
    """Prompts of which each begins with a part of an earlier one."""
    prompts: list[list[int]] = []
    while len(prompts) < count:
        base = rng.choice([[], *prompts])
        kept = base[: rng.randrange(len(base) + 1)]
        prompts.append([*kept, *(rng.randrange(9) for _ in range(rng.randrange(1, 14)))])
    return prompts


@pytest.mark.parametrize("more", [0, 1, 3, 30])
@pytest.mark.parametrize("seed", range(6))
def test_none_of_40320_orders_is_better(seed: int, more: int) -> None:
    """Eight prompts of a random tree, and pools with pages for the longest one and a few more."""
    prompts = tree_of(random.Random(seed), 8)
    pool = Pool(prompts, -(-max(map(len, prompts)) // PAGE) + more)
    order = in_order(range(8), lambda number: Sized(prompts[number], 1, 1), "prefix_tree")
    assert pool.computed(order) <= 1.03 * pool.least()


def test_the_least_is_that_of_all_permutations() -> None:
    prompts = tree_of(random.Random(7), 6)
    pool = Pool(prompts, -(-max(map(len, prompts)) // PAGE) + 1)
    assert pool.least() == min(map(pool.computed, permutations(range(6))))


@pytest.mark.parametrize("order", ["given", "prefix_tree"])
@pytest.mark.parametrize("seed", range(4))
def test_the_pool_is_the_engine_s(tmp_path: Path, seed: int, order: str) -> None:
    """One prompt at a time; one page of a pool is for padding."""
    prompts = tree_of(random.Random(seed), 30)
    room = -(-max(map(len, prompts)) // PAGE) + 2
    path = write(tmp_path / "prompts.jsonl", prompts, output=1)
    found = computed(path, order, max_num_seqs=1, num_pages=room + 1)
    served = in_order(range(30), lambda n: Sized(prompts[n], 1, 1), order)  # type: ignore[arg-type]
    assert found == Pool(prompts, room).computed(served)


@pytest.mark.parametrize(
    ("arrivals", "message"),
    [
        ("at_once", "must be 'given': workload.synthetic has no tokens that prompts could share"),
        ({"kind": "interval", "seconds": 1.0}, "must be 'given' where workload.arrivals is inter"),
    ],
)
def test_what_has_no_order(arrivals: Any, message: str) -> None:
    synthetic = {"input_len": 5, "output_len": 5}
    workload = {"synthetic": synthetic, "arrivals": arrivals, "order": "prefix_tree"}
    with pytest.raises(JaxinferError, match=f"workload.order is 'prefix_tree', {message}"):
        as_run_file({"workload": workload}).requests()


def test_orders_that_cannot_be() -> None:
    with pytest.raises(
        JaxinferError, match="order is 'shortest', must be 'given' or 'prefix_tree' or 'blend'"
    ):
        in_order([[1]], lambda each: Sized(each, 1, 1), "shortest")  # type: ignore[arg-type]
    synthetic = {"input_len": 9, "output_len": 1, "prefixes": {"tokens": 4}}
    config = as_run_file({"workload": {"synthetic": synthetic, "order": "prefix_tree"}})
    assert len(config.requests()) == 1000
    with pytest.raises(JaxinferError, match="must be 'given' where rates are searched"):
        config.requests(searched=True)


def test_a_class_counts_the_prefix() -> None:
    """Heavy prompts have more than 512 tokens: 600 with the prefix, 100 without."""
    lengths = {"input_len": 100, "output_len": 5, "count": 3}
    prefixed = {**lengths, "prefixes": {"tokens": 500}}
    heavy = as_run_file({"workload": {"synthetic": prefixed, "only": "HPLD"}}).requests()
    assert [item.prompt_len for item in heavy] == [600] * 3
    with pytest.raises(JaxinferError, match="only LPLD: none of 10000 draws"):
        as_run_file({"workload": {"synthetic": prefixed, "only": "LPLD"}}).requests()
