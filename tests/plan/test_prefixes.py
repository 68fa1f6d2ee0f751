"""The most that a prefix cache may spare, and bounds of ratios where prompts begin alike."""

import json
import random
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import RUN, Linear, problem
from properties import examples

from jaxinfer.lab.plan import problem as problem_module
from jaxinfer.lab.plan.planners.pd_ratio import PDRatio, PDRatioOptions, packed_rate, prefill_rate
from jaxinfer.lab.plan.prefixes import best_hits
from jaxinfer.lab.plan.search import DrivenSearch
from jaxinfer.workload.bench_request import BenchRequest, modelled_tokens

prompts = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=5), min_size=1, max_size=8)


def work_of(prompts: list[list[int]]) -> list[BenchRequest]:
    return [BenchRequest(tokens, len(tokens), 3, 0.0) for tokens in prompts]


def of_all_pairs(prompts: Sequence[Sequence[int]]) -> list[int]:
    """The definition, token by token; an empty prompt is one of which nothing is known."""
    wanted = []
    for number, own in enumerate(prompts):
        others = [p for i, p in enumerate(prompts) if i != number and p]
        common = [
            len(own)
            if other == own[: len(other)]
            else max(n for n in range(len(own) + 1) if own[:n] == other[:n])
            for other in others
        ]
        wanted.append(max(min(max(common, default=0), len(own) - 1), 0))
    return wanted


@given(prompts)
def test_hits_are_those_of_all_pairs(prompts: list[list[int]]) -> None:
    assert best_hits(work_of(prompts)) == of_all_pairs(prompts)


@st.composite
def blocks(draw: st.DrawFn) -> BenchRequest:
    """Blocks of few names, of which the last is short or whole, and maybe too few or too many."""
    names = tuple(draw(st.lists(st.integers(0, 2), max_size=3)))
    length = 512 * max(len(names) - 1, 0) + draw(st.sampled_from([1, 2, 511, 512, 513]))
    return BenchRequest(None, length, 1, 0.0, hash_ids=names or None)


# Tokens that are those of a block, as far as they go, and others.
tokens = st.builds(
    lambda name, count, rest: BenchRequest([name] * count + rest, count + len(rest), 1, 0.0),
    st.integers(1, 3),
    st.sampled_from([1, 511, 512, 513]),
    st.lists(st.integers(1, 3), max_size=2),
)


@pytest.mark.parametrize("requests", [blocks(), st.one_of(blocks(), tokens)])
@given(data=st.data())
@examples(60)
def test_hits_of_blocks_are_those_of_their_tokens(
    requests: st.SearchStrategy[BenchRequest], data: st.DataObject
) -> None:
    work = data.draw(st.lists(requests, min_size=1, max_size=6))
    assert best_hits(work) == of_all_pairs([tuple(modelled_tokens(item)) for item in work])


def test_blocks_are_not_unrolled() -> None:
    """2,000 prompts of 64 blocks: 66 million tokens, of which each would take 8 bytes."""
    work = [
        BenchRequest(None, 64 * 512, 1, 0.0, hash_ids=(*range(32), *range(n, n + 32)))
        for n in range(1000, 3000)
    ]
    tracemalloc.start()
    try:
        assert set(best_hits(work)) == {32 * 512}
        assert tracemalloc.get_traced_memory()[1] < 2**21
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("caching", "looked"), [(True, 1), (False, 0)])
def test_hits_are_looked_for_once_and_where_a_side_caches(
    caching: bool, looked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[object] = []
    find = problem_module.best_hits
    monkeypatch.setattr(
        problem_module, "best_hits", lambda work: counted.append(work) or find(work)
    )
    sides = {
        name: side | {"tensor_parallel": [1, 2], "engine": {"enable_prefix_caching": caching}}
        for name, side in SIDES.items()
    }
    planner = PDRatio(PDRatioOptions.model_validate(sides))
    found = list(planner.candidates(problem({"maximise": "gpu"}, {"name": "pd_ratio", **sides})))
    assert len(found) == 4
    assert len(counted) == looked


def test_prompts_without_tokens_have_no_hits() -> None:
    assert best_hits([BenchRequest(None, 9, 3, 0.0)] * 2) == [0, 0]


@given(prompts, st.integers(1, 7))
def test_what_is_in_a_cache_is_not_computed(prompts: list[list[int]], budget: int) -> None:
    """Closed form: steps of the tokens that are left, of all prompts and of each."""
    work = work_of(prompts)
    hits = best_hits(work)
    left = [len(p) - hit for p, hit in zip(prompts, hits, strict=True)]
    seconds = [-(-n // budget) * Linear.step_s + n * Linear.token_s for n in left]
    assert prefill_rate(Linear(), work, budget, hits) == pytest.approx(len(work) / sum(seconds))
    total = -(-sum(left) // budget) * Linear.step_s + sum(left) * Linear.token_s
    assert packed_rate(Linear(), work, budget, hits) == pytest.approx(len(work) / total)


SIDES: dict[str, Any] = {
    "prefill": {"kind": "A10", "most": 1, "engine": {"max_num_batched_tokens": 2048}},
    "decode": {"kind": "A10", "most": 1},
}


@pytest.mark.parametrize("seed", range(6))
def test_no_ratio_carries_more_than_its_bound_where_prompts_share(
    seed: int, tmp_path: Path
) -> None:
    """Simulated: 3 beginnings of up to 2,000 tokens, and up to 400 of their own."""
    rng = random.Random(seed)
    beginnings = [[each] * rng.randint(1, 2000) for each in (1, 2, 3)]
    outputs = rng.choice((1, 8))
    lines = [
        {
            "prompt_token_ids": rng.choice(beginnings) + [100 + i] * rng.randint(1, 400),
            "max_tokens": outputs,
        }
        for i in range(40)
    ]
    trace = tmp_path / "t.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    engine = {"max_model_len": 4096, "max_num_seqs": 16}
    run = RUN | {"workload": {"trace": str(trace)}, "engine": engine}
    goal = {"maximise": "gpu", "slo": "ttft:p90=0.25,e2e:p90=1", "precision": 0.5}
    planner = PDRatio(PDRatioOptions.model_validate(SIDES))
    search = DrivenSearch(problem(goal, {"name": "pd_ratio", **SIDES}, run=run), prune=False)
    (candidate,) = planner.candidates(search.problem)
    (score,) = search.scores([candidate])
    assert 0 < score.rate <= planner.most(candidate)


def test_blocks_that_are_known_by_name_count() -> None:
    """A trace's blocks of 512: the first two are common, and the last of the longer one is not."""
    work = [
        BenchRequest(None, 1100, 1, 0.0, hash_ids=(7, 8, 9)),
        BenchRequest(None, 1400, 1, 0.0, hash_ids=(7, 8, 3)),
        BenchRequest(None, 600, 1, 0.0, hash_ids=(4, 8)),
    ]
    assert best_hits(work) == [1024, 1024, 0]
