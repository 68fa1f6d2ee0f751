"""The blended order: what it keeps in balance, what it keeps together, and what it gains."""

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.config.run_file import as_run_file
from jaxinfer.simulate.run import prepare, serve
from jaxinfer.workload.bench_request import BenchRequest
from jaxinfer.workload.blend import LEAD, Sized, blended
from jaxinfer.workload.order import in_order, modelled_in_order

lengths = st.tuples(st.integers(1, 3000), st.integers(1, 3000))


@given(st.lists(lengths, max_size=30))
def test_computing_and_reading_stay_in_balance(work: list[tuple[int, int]]) -> None:
    """Without common tokens, reading is ahead by the lead, but for one request's share."""
    order = blended([Sized([n], prompt, output) for n, (prompt, output) in enumerate(work)])
    assert sorted(order) == list(range(len(work)))
    computes = [prompt + output for prompt, output in work]
    # Each of the output's tokens reads the prompt, and half of the output in the mean.
    reads = [output * (prompt + output / 2) for prompt, output in work]
    shares = [(c / sum(computes), r / sum(reads)) for c, r in zip(computes, reads, strict=True)]
    most = max((abs(c - r) for c, r in shares), default=0)
    ahead = 0.0
    for number in order:
        ahead += shares[number][1] - shares[number][0]
        assert -most - 1e-9 <= ahead <= LEAD + most + 1e-9


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=5), lengths), max_size=20))
def test_each_request_is_served_once(work: list[tuple[list[int], tuple[int, int]]]) -> None:
    """Whatever prompts share, and where no tokens are known."""
    batch = [Sized(units, *each) for units, each in work]
    assert sorted(blended(batch)) == list(range(len(batch)))


@pytest.mark.parametrize("output", [300, 424, 500])
def test_a_prompt_computes_its_output_at_least(output: int) -> None:
    """Two prompts share two blocks, of which the shorter one does not fill the second.

    Its output computes 1 per 600 to 850 reads, that of the other 1 per 100: it is denser.
    """
    batch = [Sized((1, 2), 600, output), Sized((1, 2), 1024, 50), Sized((7,), 100, 1)]
    assert blended(batch) == [0, 2, 1]


def groups_of(order: Sequence[int], each: int) -> int:
    """Return how often the group changes in an order, where a group is ``each`` requests."""
    return 1 + sum(a // each != b // each for a, b in pairwise(order))


@pytest.mark.parametrize("seed", range(4))
def test_what_is_shared_stays_together(seed: int) -> None:
    """Of 20 contexts with 10 prompts each, at most two are under way at a time."""
    rng = random.Random(seed)
    batch = []
    for context in range(20):
        own, output = rng.choice(((300, 5), (5, 300)))
        for n in range(10):
            batch.append(Sized([context] * 100 + [100 + n] * own, 100 + own, output))
    order = blended(batch)
    open_contexts: dict[int, int] = {}
    most = 0
    for number in order:
        context = number // 10
        open_contexts[context] = open_contexts.get(context, 0) + 1
        most = max(most, len(open_contexts))
        if open_contexts[context] == 10:
            del open_contexts[context]
    assert most == 2
    # Contexts of two kinds take turns, which one kind alone does not.
    assert groups_of(order, 10) > 20
    alike = [each._replace(output_len=5) for each in batch]
    assert groups_of(in_order(range(200), lambda n: alike[n], "prefix_tree"), 10) == 20


def test_by_hand() -> None:
    """Two prompts of one context, which are computed most, and two long outputs."""
    batch = [
        Sized([1, 1, 1, 5], 400, 1),
        Sized([2, 7], 20, 100),
        Sized([1, 1, 1, 6], 400, 1),
        Sized([3, 8], 20, 100),
    ]
    # The outputs have half of the reading each, and a sixth of the computing; that of the context
    # has little reading.
    assert blended(batch) == [3, 0, 1, 2]


def seconds(order: str) -> float:
    """A batch's makespan on a simulated A10, whose pool has room for about 100 long outputs."""
    prompts = [BenchRequest(None, 1800, 8, 0.0, prefix=(1 + n % 2, 300)) for n in range(200)]
    work = [*prompts, *[BenchRequest(None, 600, 600, 0.0, prefix=(0, 500))] * 100]
    random.Random(0).shuffle(work)
    engine = {"max_num_seqs": 256, "max_num_batched_tokens": 512, "max_model_len": 4096}
    config = as_run_file(
        {
            "model": "llama-3-8b",
            "engine": {**engine, "policies": {"admit": "once_per_prefix"}},
            "groups": {"g": {"kind": "A10"}},
            "instances": {"a": {"group": "g"}},
        }
    )
    return serve(prepare(config), modelled_in_order(work, order)).wall_s  # type: ignore[arg-type]


def test_a_blend_fills_the_steps_of_long_outputs() -> None:
    blend = seconds("blend")
    assert blend < 0.94 * seconds("prefix_tree")
    assert blend < 0.99 * seconds("given")


def test_a_run_file_blends_by_lengths_that_users_give() -> None:
    """No tokens are needed; where users give one limit, true lengths do not count."""
    synthetic = {"input_len": 50, "output_len": {"kind": "uniform", "min": 1, "max": 900}}
    workload = {"synthetic": {**synthetic, "count": 30}, "order": "blend"}
    drawn = as_run_file({"workload": {**workload, "order": "given"}}).requests()
    blend = as_run_file({"workload": workload}).requests()
    assert blend != drawn
    assert sorted(each.max_tokens for each in blend) == sorted(each.max_tokens for each in drawn)
    limited = as_run_file({"workload": {**workload, "max_tokens": 900}}).requests()
    alike = blended([Sized([n], 50, 900) for n in range(30)])
    assert limited == [drawn[number] for number in alike]
