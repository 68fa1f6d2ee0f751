"""The bound of a cluster's rate: closed forms, all schedules of tiny cases, any system's runs."""

import functools
import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from jaxinfer.config.run_file import load_run_file
from jaxinfer.config.step_costs import LinearCosts
from jaxinfer.errors import JaxinferError
from jaxinfer.files.shipped import data_path
from jaxinfer.hardware.catalogue import find_gpu, find_model
from jaxinfer.lab.plan.bound import Bound, InstanceLimits, bound_of, solve, spans
from jaxinfer.serving.batch import Work
from jaxinfer.simulate.costs.linear import LinearStage
from jaxinfer.simulate.costs.roofline import KernelEfficiency, RooflineStage
from jaxinfer.simulate.costs.step_floor import ProductFloor, StepFloor
from jaxinfer.simulate.run import prepare, serve
from jaxinfer.workload.bench_request import BenchRequest

LINEAR = StepFloor(step_s=0.5, token_s=0.01, sequence_s=0.02, context_s=0.001, pair_s=0.0003)


def of_lengths(floor: StepFloor, seats: int, pool: int, *lengths: tuple[int, int]) -> Bound:
    """The bound of one instance of one stage, and requests of (prompt, output) tokens."""
    prompt, output = np.array(lengths).T
    placed = spans(0 * prompt, prompt), spans(prompt, prompt + output - 1)
    return solve({InstanceLimits((floor,), seats, pool): 1}, *placed, prompt.max())


@pytest.mark.parametrize(("seats", "pool"), [(4, 10**6), (4, 60), (100, 200)])
@pytest.mark.parametrize(("prompt", "output"), [(7, 1), (1, 9), (30, 20)])
def test_one_instance_whose_steps_are_linear(
    seats: int, pool: int, prompt: int, output: int
) -> None:
    """The bound has as many steps as seats or the pool ask for, and the work of each request."""
    pairs = prompt * (prompt + 1) / 2
    entries = sum(range(prompt + 1, prompt + output))
    steps = max(output / seats, entries / pool)
    seconds = 0.5 * steps + 0.01 * (prompt + output - 1) + 0.02 * output
    seconds += 0.001 * entries + 0.0003 * pairs
    found = of_lengths(LINEAR, seats, pool, (prompt, output))
    assert found.rate == pytest.approx(1 / seconds, rel=1e-6)


def test_a_product_reads_its_weights_once_a_step() -> None:
    """Prompts alone are computed as fast as FLOPs go, decodes as the weights are read."""
    floor = StepFloor(products=(ProductFloor(0.002, 0.8, 0.0001),))
    # Steps of any size: the fewest that four seats allow.
    assert of_lengths(floor, 4, 10**6, (1000, 1)).rate == pytest.approx(1 / 2.0, rel=1e-6)
    decodes = 0.8 / 4 + 0.0001  # Of each token.
    assert of_lengths(floor, 4, 10**9, (1, 1001)).rate == pytest.approx(
        1 / (1001 * decodes), rel=1e-3
    )


def test_prompts_that_fill_steps_of_decodes_cost_nothing_but_their_reading() -> None:
    """While weights are read, the FLOPs of some tokens are free, those of prompts included."""
    floor = StepFloor(products=(ProductFloor(0.01, 1.0, 0.0),))
    # A request has ten decodes or first tokens of two seats: five steps of a second, each with room
    # for a hundred tokens, of which the request has 199.
    assert of_lengths(floor, 2, 10**6, (190, 10)).rate == pytest.approx(1 / 5, rel=1e-6)


def test_two_instances_of_which_each_does_what_it_is_better_at() -> None:
    """The first computes ten times as fast, the other reads ten times as fast."""
    computes = StepFloor(token_s=0.01, context_s=0.01)
    reads = StepFloor(token_s=0.1, context_s=0.001)
    prompt, output = np.array([1]), np.array([17])
    parts = spans(0 * prompt, prompt), spans(prompt, prompt + output - 1)
    assert [span.high - span.low for span in parts[1]] == [2] * 8
    # By hand: the first does the prompt and the decodes that see the least, so many and a part of
    # one that both take equally long.
    first, second = 0.01, sum(0.1 + 0.001 * seen for seen in range(2, 18))
    for seen in range(2, 18):
        one, other = 0.01 + 0.01 * seen, 0.1 + 0.001 * seen
        share = min(max((second - first) / (one + other), 0), 1)
        first, second = first + share * one, second - share * other
    assert first == pytest.approx(second)
    kinds = {InstanceLimits((each,), 100, 10**6): 1 for each in (computes, reads)}
    assert solve(kinds, *parts, 1).rate == pytest.approx(1 / first, rel=1e-6)


def test_the_slower_of_two_stages() -> None:
    """The last one has the head, whose weights are read for four tokens at a time."""
    first, last = (
        StepFloor(token_s=0.01),
        StepFloor(token_s=0.002, head=ProductFloor(0.1, 8.0, 0.5)),
    )
    prompt, output = np.array([50]), np.array([10])
    parts = spans(0 * prompt, prompt), spans(prompt, prompt + output - 1)
    for stages, seconds in (
        ((first, last), 59 * 0.002 + 10 * (8 / 4 + 0.5)),
        ((last, first), 59 * 0.002 + 10 * (8 / 4 + 0.5)),
        ((first, StepFloor(token_s=0.002)), 59 * 0.01),
    ):
        found = solve({InstanceLimits(stages, 4, 10**6): 1}, *parts, 50)
        assert found.rate == pytest.approx(1 / seconds, rel=1e-6)


@pytest.mark.parametrize("count", [1, 3])
def test_so_many_alike_do_so_many_times_as_much(count: int) -> None:
    prompt, output = np.array([30, 70]), np.array([20, 3])
    parts = spans(0 * prompt, prompt), spans(prompt, prompt + output - 1)
    one = solve({InstanceLimits((LINEAR,), 4, 600): 1}, *parts, 70)
    assert solve({InstanceLimits((LINEAR,), 4, 600): count}, *parts, 70).rate == pytest.approx(
        count * one.rate, rel=1e-6
    )


def test_a_request_s_parts_are_worth_one_request() -> None:
    found = of_lengths(LINEAR, 4, 400, (30, 20), (100, 3), (5, 80))
    parts = zip((*found.prompts, *found.decodes), found.token_worth, found.entry_worth, strict=True)
    worth = sum(span.tokens * token + span.entries * entry for span, token, entry in parts)
    assert worth + found.first_worth == pytest.approx(1)


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=9))
@examples(50)
def test_spans_have_all_of_the_work(lengths: list[tuple[int, int]]) -> None:
    prompt, output = np.array(lengths).T
    own, rows = spans(0 * prompt, prompt), spans(prompt, prompt + output - 1)
    assert sum(s.tokens for s in own) == pytest.approx(prompt.mean())
    assert sum(s.tokens for s in rows) == pytest.approx(output.mean() - 1)
    seen = [sum(range(p + 1, p + o)) for p, o in lengths]
    assert sum(s.entries for s in rows) == pytest.approx(np.mean(seen))
    for span in (*own, *rows):
        low, high = span.tokens * (span.low + 1), span.tokens * span.high
        assert low * (1 - 1e-9) <= span.entries <= high * (1 + 1e-9)


def least_seconds(floor: StepFloor, lengths: Sequence[tuple[int, int]], seats: int) -> float:
    """The least makespan of all schedules, by trying each composition of each step."""

    @functools.cache
    def left(done: tuple[int, ...]) -> float:
        ends = [p + o - 1 for p, o in lengths]
        if all(d == end for d, end in zip(done, ends, strict=True)):
            return 0.0
        # A prompt's tokens in chunks of any length; decodes one at a time.
        choices = [
            range(max(p - d, int(d < end)) + 1)
            for d, end, (p, _) in zip(done, ends, lengths, strict=True)
        ]
        best = float("inf")
        for counts in itertools.product(*choices):
            after = tuple(d + c for d, c in zip(done, counts, strict=True))
            samples = sum(
                c > 0 and a >= p for c, a, (p, _) in zip(counts, after, lengths, strict=True)
            )
            if not any(counts) or samples > seats:
                continue
            best = min(best, step(floor, done, counts, lengths, samples) + left(after))
        return best

    return left((0,) * len(lengths))


def step(
    floor: StepFloor,
    done: Sequence[int],
    counts: Sequence[int],
    lengths: Sequence[tuple[int, int]],
    samples: int,
) -> float:
    """The seconds of a step, by its parts as their docstrings say."""
    tokens, seconds = sum(counts), floor.step_s
    seconds += floor.token_s * tokens + sum(p.seconds(tokens) for p in floor.products)
    if floor.head and samples:
        seconds += floor.head.seconds(samples)
    for before, count, (prompt, _) in zip(done, counts, lengths, strict=True):
        seen = sum(range(before + 1, before + count + 1))
        each = floor.context_s if before >= prompt else floor.pair_s
        seconds += floor.sequence_s * (count > 0) + each * seen
    return seconds


@given(
    lengths=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=3),
    seats=st.integers(1, 3),
    parts=st.tuples(*[st.floats(0.001, 1)] * 8),
)
@examples(25)
def test_no_schedule_of_a_tiny_case_is_faster(
    lengths: list[tuple[int, int]], seats: int, parts: tuple[float, ...]
) -> None:
    floor = StepFloor(
        (ProductFloor(parts[0], parts[1], parts[2]),),
        ProductFloor(parts[3], parts[4], 0.001),
        *parts[5:],
        context_s=0.02,
        pair_s=0.01,
    )
    rate = len(lengths) / least_seconds(floor, lengths, seats)
    assert rate <= of_lengths(floor, seats, 10**6, *lengths).rate * (1 + 1e-6)


# The least times of steps.


def least(floor: StepFloor, work: Work) -> float:
    """The seconds of a step with this work, by the parts' docstrings."""
    seconds = floor.step_s + floor.token_s * work.tokens + floor.sequence_s * work.sequences
    seconds += floor.context_s * work.single_context + floor.pair_s * work.pairs
    seconds += sum(product.seconds(work.tokens) for product in floor.products)
    return seconds + (floor.head.seconds(work.sampled) if floor.head and work.sampled else 0)


def roofline(model: str, devices: int = 1) -> RooflineStage:
    efficiency = KernelEfficiency(0.5, 0.8, 0.003, 0.0002)
    gpu, shape = find_gpu("A100-80G-SXM"), find_model(model)
    return RooflineStage(gpu, shape, 7, True, devices, 2, efficiency, 200.0, 0.00001)


@given(
    decodes=st.lists(st.integers(1, 5000), max_size=40),
    chunks=st.lists(st.tuples(st.integers(0, 3000), st.integers(2, 600)), max_size=4),
    model=st.sampled_from(("llama-3-8b", "mixtral-8x7b")),
    devices=st.sampled_from((1, 4)),
)
@examples(60)
def test_steps_take_what_their_floor_says_or_more(
    decodes: list[int], chunks: list[tuple[int, int]], model: str, devices: int
) -> None:
    """The same, but for chunks that read more than they compute, and experts of several tokens."""
    stage, rows = roofline(model, devices), len(decodes) + len(chunks)
    tokens = len(decodes) + sum(count for _, count in chunks)
    if not rows:
        return
    work = Work(tokens, len(decodes), rows, rows, sum(decodes), chunks, len(decodes))
    floor, seconds = least(stage.floor(), work), stage.seconds(work)
    assert floor <= seconds * (1 + 1e-9)
    far = [count > 300 and start < 1000 for start, count in chunks]
    if tokens == 1 or (model == "llama-3-8b" and all(far)):
        assert floor == pytest.approx(seconds)


def test_a_floor_of_linear_costs() -> None:
    costs = LinearCosts(step_s=0.01, token_s=0.001, sequence_s=0.002, decode_context_s=0.00001)
    stage = LinearStage(costs, share=0.25)
    work = Work(103, 3, 4, 4, 900, [(0, 100)], 3)
    assert least(stage.floor(), work) == pytest.approx(stage.seconds(work))


def test_a_cluster_by_hand() -> None:
    """Two instances of linear steps, whose seats all take a step's constant."""
    costs = "{step_s: 0.25, token_s: 0.001, sequence_s: 0.002, decode_context_s: 0.00001}"
    config = load_run_file(
        data_path("configs/cronus/data_parallel.yaml"),
        [f"simulate.linear={costs}", "engine.max_num_seqs=10"],
    )
    work = [BenchRequest(None, 40, 6, 0.0)]
    seconds = 0.25 * 6 / 10 + 0.001 * 45 + 0.002 * 6 + 0.00001 * sum(range(41, 46))
    assert bound_of(prepare(config), work).rate == pytest.approx(2 / seconds, rel=1e-6)


# What any system does.


SYSTEMS = ("cronus", "data_parallel", "disaggregated_low_high", "pipeline_parallel")
KINDS = ("A100-80G-SXM", "A10", "H100-SXM", "L4")


@given(
    system=st.sampled_from(SYSTEMS),
    kinds=st.tuples(st.sampled_from(KINDS), st.sampled_from(KINDS)),
    lengths=st.lists(st.tuples(st.integers(1, 900), st.integers(1, 60)), min_size=1, max_size=25),
    budget=st.sampled_from((64, 512)),
    step_s=st.sampled_from((0.0, 0.002)),
    linear=st.booleans(),
)
@examples(40)
def test_no_run_of_any_system_is_faster(
    system: str,
    kinds: tuple[str, str],
    lengths: list[tuple[int, int]],
    budget: int,
    step_s: float,
    linear: bool,
) -> None:
    costs = "{step_s: 0.01, token_s: 0.00001, decode_context_s: 0.0000001}"
    settings = [
        f"groups.high.kind={kinds[0]}",
        f"groups.low.kind={kinds[1]}",
        f"engine.max_num_batched_tokens={budget}",
        "engine.max_num_seqs=16",
        f"simulate.linear={costs}" if linear else f"simulate.step_s={step_s}",
    ]
    config = load_run_file(data_path(f"configs/cronus/{system}.yaml"), settings)
    work = [BenchRequest(None, p, o, 0.0) for p, o in lengths]
    cluster = prepare(config)
    bound = bound_of(cluster, work)
    made = serve(cluster, work, None)
    assert len(work) / made.wall_s <= bound.rate * (1 + 1e-6)


def test_what_has_no_bound_says_so() -> None:
    path = data_path("configs/cronus/data_parallel.yaml")
    phases = "{prefill: {token_s: 0.001}, decode: [{sequence_s: 0.001, context_s: 0.000001}]}"
    config = load_run_file(path, [f"simulate.phases={phases}"])
    work = [BenchRequest(None, 5, 5, 0.0)]
    with pytest.raises(JaxinferError, match=r"no bound: instances\.\w+: the least times"):
        bound_of(prepare(config), work)
