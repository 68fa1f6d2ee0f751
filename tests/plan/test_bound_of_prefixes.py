"""The bound where prompts begin alike: counts by hand, a closed form, and any system's runs."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from jaxinfer.config.run_file import RunFile, load_run_file
from jaxinfer.errors import JaxinferError
from jaxinfer.files.shipped import data_path
from jaxinfer.lab.plan.bound import InstanceLimits, bound_of, solve, spans
from jaxinfer.lab.plan.prefixes import shared_pages
from jaxinfer.lab.plan.worth import WorthDone
from jaxinfer.simulate.costs.step_floor import StepFloor
from jaxinfer.simulate.run import prepare, serve
from jaxinfer.workload.bench_request import BenchRequest, modelled_tokens
from jaxinfer.workload.synthetic import Synthetic

PAGE = 4


def of_tokens(*prompts: Sequence[int], output: int = 1) -> list[BenchRequest]:
    return [BenchRequest(list(tokens), len(tokens), output, 0.0) for tokens in prompts]


def test_pages_by_hand() -> None:
    """Ten common tokens share two pages; a copy computes its last page again for the last token."""
    a, b = [*range(1, 11), 90, 91, 92], [*range(1, 11), 80, 81]
    found = shared_pages(of_tokens(a, b, a, [70]), [PAGE])
    assert found.first == [8, 0, 12, 0]
    assert found.most == [12, 8, 12, 0]
    assert shared_pages(of_tokens(a, b, a, [70]), []).first == [0] * 4
    # An instance with pages of five tokens shares all ten.
    assert sorted(shared_pages(of_tokens(a, b), [PAGE, 5]).first) == [0, 10]


@st.composite
def trees(draw: st.DrawFn) -> list[list[int]]:
    """Prompts that begin with parts of others."""
    prompts: list[list[int]] = []
    for number in range(draw(st.integers(1, 8))):
        base = draw(st.sampled_from([[], *prompts]))
        kept = base[: draw(st.integers(0, len(base)))]
        own = draw(st.integers(1, 9))
        prompts.append([*kept, *(100 + 10 * number + i for i in range(own))])
    return prompts


@given(trees())
def test_each_full_page_is_computed_once(prompts: list[list[int]]) -> None:
    """Counted as a set of pages; the last token of each prompt is its own, and no output helps."""
    # No prompt is the whole beginning of another.
    prompts = [[*tokens, -1 - n] for n, tokens in enumerate(prompts)]
    pages = {tuple(p[:end]) for p in prompts for end in range(PAGE, len(p), PAGE)}
    rest = sum(len(p) - (len(p) - 1) // PAGE * PAGE for p in prompts)
    found = shared_pages(of_tokens(*prompts), [PAGE])
    left = sum(len(p) - first for p, first in zip(prompts, found.first, strict=True))
    assert left == PAGE * len(pages) + rest
    for number, own in enumerate(prompts):
        others = {
            tuple(p[:end])
            for n, p in enumerate(prompts)
            for end in range(PAGE, len(p) + 1, PAGE)
            if n != number
        }
        full = len(own) // PAGE * PAGE
        shared = [end for end in range(PAGE, full + 1, PAGE) if tuple(own[:end]) in others]
        assert found.most[number] == max(shared, default=0)


def test_an_output_may_continue_a_prompt() -> None:
    """Six tokens, and four of the output that have entries; the longer prompt may have them all."""
    work = [*of_tokens([1, 2, 3, 4, 5, 6], output=5), *of_tokens([1, 2, 3, 4, 5, 6, 0, 0, 0, 0, 9])]
    assert shared_pages(work, [2]).first == [0, 10]
    assert shared_pages(work, [2]).most == [10, 10]
    assert shared_pages(work, [PAGE]).first == [0, 8]


def test_synthetic_prompts_share_what_their_tokens_do() -> None:
    prefixes = {"count": 3, "tokens": 10}
    synthetic = Synthetic(input_len=5, output_len=3, count=20, prefixes=prefixes)  # type: ignore[arg-type]
    work = synthetic.requests()
    tokens = [list(modelled_tokens(item, n)) for n, item in enumerate(work)]
    found, known = (shared_pages(each, [PAGE]) for each in (work, of_tokens(*tokens, output=3)))
    assert sum(found.first) == sum(known.first) == 17 * 8
    assert found.most == known.most == [8] * 20


def test_turns_share_with_the_turn_before_but_not_at_the_same_time() -> None:
    """Turns of 14, 22 and 30 tokens; 16 and 24 entries are there after the turns before."""
    options = {"prefixes": {"tokens": 9}, "sessions": {"turns": 3}}
    synthetic = Synthetic(input_len=5, output_len=3, count=6, **options)  # type: ignore[arg-type]
    found = shared_pages(synthetic.requests(), [PAGE])
    assert sorted(found.first) == [0, 8, 16, 16, 24, 24]
    assert found.most == [8] * 6


@pytest.mark.parametrize("shared", [0, 32, 64])
def test_shared_entries_take_room_once(shared: int) -> None:
    """A pool of 200 entries needs several steps of 0.5 s, and each step reads all entries."""
    prompt, output = 64, 20
    floor = StepFloor(step_s=0.5, token_s=0.01, context_s=0.001)
    own, end, most = np.array([prompt]), np.array([prompt + output - 1]), np.array([shared])
    first = np.array([60])
    rows = spans(own, end, most if shared else None)
    found = solve({InstanceLimits((floor,), 1000, 200): 1}, spans(first, own), rows, 64, shared)
    seen = range(prompt + 1, prompt + output)
    steps = sum(n - shared for n in seen) / 200
    seconds = 0.5 * steps + 0.01 * (4 + output - 1) + 0.001 * sum(seen)
    assert found.rate == pytest.approx(1 / seconds, rel=1e-6)


# What any system does.

KINDS = ("A100-80G-SXM", "A10", "H100-SXM", "L4")
ON = "engine.enable_prefix_caching=true"
COSTS = "{step_s: 0.01, token_s: 0.00001, decode_context_s: 0.0000001}"


def run_of(system: str, kinds: tuple[str, str], *settings: str) -> RunFile:
    name, _, system = system.partition(" ")
    settings = (*settings, f"system={system}") if system else settings
    given = [f"groups.high.kind={kinds[0]}", f"groups.low.kind={kinds[1]}", *settings]
    return load_run_file(data_path(f"configs/{name}.yaml"), given)


@st.composite
def shared_work(draw: st.DrawFn) -> list[BenchRequest]:
    """Prompts of a tree, or synthetic ones with prefixes, or the turns of sessions."""
    kind, count = (
        draw(st.sampled_from(("tokens", "prefixes", "sessions"))),
        draw(st.integers(1, 60)),
    )
    prefix, own = draw(st.integers(1, 1500)), draw(st.sampled_from((2, 20, 300)))
    output, prefixes = draw(st.sampled_from((2, 9, 60))), draw(st.integers(1, 4))
    if kind == "tokens":
        rng = draw(st.randoms(use_true_random=False))
        # Zeros are what a modelled run samples.
        ends = [[rng.randint(0, 2)] * rng.randint(0, own) for _ in range(count)]
        prompts = [[rng.randint(1, prefixes)] * prefix + end for end in ends]
        return [BenchRequest(p, len(p), rng.randint(1, output), 0.0) for p in prompts]
    lengths = {"input_len": own, "output_len": output, "range_ratio": 0.5, "count": count}
    options = {"prefixes": {"count": prefixes, "tokens": prefix}}
    if kind == "sessions":
        options["sessions"] = {"turns": draw(st.integers(1, 3))}
    return Synthetic.model_validate(lengths | options).requests()


@given(
    system=st.sampled_from(
        (
            "cronus/cronus",
            "cronus/data_parallel",
            "cronus/disaggregated_low_high",
            "cronus/pipeline_parallel",
            "cronus/data_parallel {name: prefix_aware, load: tokens}",
            "takeover/pair",
        )
    ),
    kinds=st.tuples(st.sampled_from(KINDS), st.sampled_from(KINDS)),
    work=shared_work(),
    page_sizes=st.sampled_from(((8, 8), (16, 16), (16, 24))),
    small=st.booleans(),
    admit=st.sampled_from(("greedy", "once_per_prefix")),
    linear=st.booleans(),
)
@examples(60)
def test_no_run_of_any_system_beats_the_bound_by_its_caches(
    system: str,
    kinds: tuple[str, str],
    work: list[BenchRequest],
    page_sizes: tuple[int, int],
    small: bool,
    admit: str,
    linear: bool,
) -> None:
    has_low = system.startswith(("cronus/data_parallel", "takeover"))
    config = run_of(
        system,
        kinds,
        ON,
        f"engine.page_size={page_sizes[0]}",
        *([f"instances.low.page_size={page_sizes[1]}"] if has_low else []),
        f"engine.policies.admit={admit}",
        "engine.max_num_seqs=32",
        # No request is longer.
        *([f"engine.num_pages={4000 // page_sizes[0] + 1}"] if small else []),
        *([f"simulate.linear={COSTS}"] if linear else []),
    )
    cluster = prepare(config)
    bound = bound_of(cluster, work)
    made = serve(cluster, work, None)
    assert len(work) / made.wall_s <= bound.rate * (1 + 1e-6)


def test_decodes_that_share_a_prefix_are_more_than_the_pool_has_entries() -> None:
    """30 requests share 1,400 entries of a pool of 4,000, and each has 80 entries of its own."""
    options = {"prefixes": {"tokens": 1400}, "input_len": 20, "output_len": 60, "count": 60}
    work = Synthetic.model_validate(options).requests()
    settings = [ON, "engine.num_pages=251", "engine.policies.admit=once_per_prefix"]
    system = "cronus/data_parallel least_loaded"
    config = run_of(system, ("A10", "A10"), *settings, f"simulate.linear={COSTS}")
    cluster = prepare(config)
    rate = len(work) / serve(cluster, work, None).wall_s
    unshared = bound_of(cluster, [replace(item, prefix=None) for item in work]).rate
    assert 2 * unshared < rate < bound_of(cluster, work).rate


@pytest.mark.parametrize("system", ["cronus/data_parallel", "takeover/pair"])
def test_a_workload_without_common_beginnings_has_the_same_bound(system: str) -> None:
    """The bound is the same float with and without caches, and with and without known tokens."""
    lengths = [(p, o) for p in (30, 200, 900) for o in (1, 20, 300)]
    unknown = [BenchRequest(None, p, o, 0.0) for p, o in lengths]
    known = of_tokens(*([n] * p for n, (p, _) in enumerate(lengths, 1)))
    known = [replace(item, max_tokens=o) for item, (_, o) in zip(known, lengths, strict=True)]
    bounds = [
        bound_of(prepare(run_of(system, KINDS[:2], f"engine.enable_prefix_caching={on}")), work)
        for on in ("true", "false")
        for work in (unknown, known)
    ]
    assert all(bound == bounds[0] for bound in bounds)
    assert not bounds[0].shares


def test_a_shared_run_has_no_worth_over_time() -> None:
    work = of_tokens([1] * 60, [1] * 50)
    bound = bound_of(prepare(run_of("cronus/data_parallel", KINDS[:2], ON)), work)
    with pytest.raises(JaxinferError, match=r"engine\.enable_prefix_caching=false"):
        WorthDone(bound)
