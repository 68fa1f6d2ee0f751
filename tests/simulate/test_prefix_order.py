"""Batches in the order of their prefixes: what is computed, beside the least that could be."""

import json
import random
from collections import OrderedDict
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from jaxinfer import JaxinferError
from jaxinfer.config.run_file import as_run_file
from jaxinfer.simulate.run import simulate
from jaxinfer.workload.order import in_order

PAGE = 4


def computed(path: Path, order: str, admit: str = "greedy", num_pages: int = 60) -> int:
    """Prompt tokens that a simulation computes."""
    config = as_run_file(
        {
            "model": "llama-3-8b",
            "engine": {
                "page_size": PAGE,
                "max_num_seqs": 4,
                "max_num_batched_tokens": 32,
                "max_model_len": 128,
                "num_pages": num_pages,
                "policies": {"admit": admit},
            },
            "groups": {"g": {"kind": "A100-80G-SXM"}},
            "instances": {"a": {"group": "g"}},
            "workload": {"trace": str(path), "order": order},
        }
    )
    found = simulate(config, config.requests())
    return found.prompt_tokens - found.cached_tokens


def write(path: Path, prompts: Sequence[Sequence[int]]) -> Path:
    rows = [{"prompt_token_ids": list(tokens), "max_tokens": 3} for tokens in prompts]
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


def by_lru(prompts: Sequence[Sequence[int]], num_pages: int) -> int:
    """Tokens computed one prompt at a time, with a cache of pages that drops the oldest."""
    cache: OrderedDict[tuple[int, ...], None] = OrderedDict()
    total = 0
    for tokens in prompts:
        keys = [tuple(tokens[:end]) for end in range(PAGE, len(tokens), PAGE)]
        hits = next((i for i, key in enumerate(keys) if key not in cache), len(keys))
        total += len(tokens) - hits * PAGE
        for key in reversed(keys):
            cache[key] = None
            cache.move_to_end(key)
        while len(cache) > num_pages:
            cache.popitem(last=False)
    return total


@pytest.mark.parametrize("seed", range(6))
def test_no_order_is_better(seed: int) -> None:
    """All 5,040 orders of seven prompts of a random tree, with room for one prompt's pages."""
    rng = random.Random(seed)
    prompts: list[list[int]] = []
    while len(prompts) < 7:
        base = rng.choice([[], *prompts])
        kept = base[: rng.randrange(len(base) + 1)]
        prompts.append([*kept, *(rng.randrange(9) for _ in range(rng.randrange(1, 14)))])
    room = max(map(len, prompts)) // PAGE
    best = min(by_lru(order, room) for order in permutations(prompts))
    assert by_lru(in_order(prompts, list, "prefix_tree"), room) <= 1.03 * best


@pytest.mark.parametrize(
    ("arrivals", "message"),
    [
        ("at_once", "must be given: workload.synthetic has no tokens that prompts could share"),
        ({"kind": "interval", "seconds": 1.0}, "must be given where workload.arrivals is interval"),
    ],
)
def test_what_has_no_order(arrivals: Any, message: str) -> None:
    synthetic = {"input_len": 5, "output_len": 5}
    workload = {"synthetic": synthetic, "arrivals": arrivals, "order": "prefix_tree"}
    with pytest.raises(JaxinferError, match=f"workload.order is prefix_tree, {message}"):
        as_run_file({"workload": workload}).requests()


def test_orders_that_cannot_be() -> None:
    with pytest.raises(
        JaxinferError, match="order is 'shortest', must be 'given' or 'prefix_tree'"
    ):
        in_order([[1]], list, "shortest")  # type: ignore[arg-type]
    synthetic = {"input_len": 9, "output_len": 1, "prefixes": {"tokens": 4}}
    config = as_run_file({"workload": {"synthetic": synthetic, "order": "prefix_tree"}})
    assert len(config.requests()) == 1000
    with pytest.raises(JaxinferError, match="must be given where rates are searched"):
        config.requests(searched=True)


def test_a_class_counts_the_prefix() -> None:
    """Heavy prompts have more than 512 tokens: 600 with the prefix, 100 without."""
    lengths = {"input_len": 100, "output_len": 5, "count": 3}
    prefixed = {**lengths, "prefixes": {"tokens": 500}}
    heavy = as_run_file({"workload": {"synthetic": prefixed, "only": "HPLD"}}).requests()
    assert [item.prompt_len for item in heavy] == [600] * 3
    with pytest.raises(JaxinferError, match="only LPLD: none of 10000 draws"):
        as_run_file({"workload": {"synthetic": prefixed, "only": "LPLD"}}).requests()
