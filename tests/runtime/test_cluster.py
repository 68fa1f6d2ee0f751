"""Every way of serving yields the tokens of one instance on one device, and moves what it should.

Models are in float32, where the likeliest token stands out by more than rounding changes.
"""

import random
from itertools import product
from pathlib import Path

import pytest
from cluster_cases import (
    HEADS,
    KINDS_A,
    KINDS_B,
    LENGTHS,
    PEAK,
    SIDES,
    WAYS,
    Case,
    G,
    H,
    Loader,
    Pair,
    Request,
    covering_cases,
    cut_of,
    few_cases,
    roomy,
    set_pools,
)
from cluster_checks import (
    REQUESTS,
    Done,
    Ran,
    check_case,
    check_nothing_is_computed_twice,
    serve,
)

from jaxinfer import LLM


@pytest.mark.slow
def test_tokens_stand_out(alone: dict[str, LLM]) -> None:
    """Equality is a fair demand: greedy ones lead by a margin, draws bear options near theirs."""
    greedy = [request for request in REQUESTS if request.params.temperature == 0]
    drawn = [request for request in REQUESTS if request.params.temperature > 0]
    for llm in alone.values():
        outputs = llm.generate(
            [{"prompt_token_ids": list(request.prompt)} for request in greedy],
            [request.params.model_copy(update={"logprobs": 2}) for request in greedy],
            progress=False,
        )
        for output in outputs:
            for position in output.outputs[0].logprobs or [{}]:
                first, second = sorted((p.logprob for p in position.values()), reverse=True)
                assert first - second > 1e-3
        reference = serve(llm, drawn)
        for factor in (1 - 1e-4, 1 + 1e-4):
            for option in ("temperature", "top_p"):
                near = [
                    Request(r.prompt, r.params.model_copy(update={option: value * factor}))
                    for r in drawn
                    for value in [getattr(r.params, option)]
                ]
                assert [d.tokens for d in serve(llm, near)] == [d.tokens for d in reference]
        assert len({token for done in reference for token in done.tokens}) > 40


@pytest.mark.parametrize("case", few_cases(), ids=str)
def test_ways_of_serving_give_the_same_tokens(
    case: Case, loader: Loader, expected: dict[str, list[Done]], tmp_path: Path
) -> None:
    check_case(case, loader.pair(case.pair), expected[case.pair.heads], tmp_path)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.long if number % 2 else pytest.mark.slow)
        for number, case in enumerate(covering_cases())
    ],
    ids=str,
)
def test_every_way_of_serving_gives_the_same_tokens(
    case: Case, loader: Loader, expected: dict[str, list[Done]], tmp_path: Path
) -> None:
    check_case(case, loader.pair(case.pair), expected[case.pair.heads], tmp_path)


def test_the_cases_cover_what_they_are_to_cover() -> None:
    cases = covering_cases()
    for what in ("devices", "page_size", "stages"):
        a, b = ({getattr(side, what) for side in kinds} for kinds in (KINDS_A, KINDS_B))
        both = {(getattr(c.pair.a, what), getattr(c.pair.b, what)) for c in cases}
        assert both == set(product(a, b))
    ways = {(c.way.system, c.way.cut, c.way.rule) for c in cases}
    assert ways == {(way.system, way.cut, way.rule) for way in WAYS}
    shortages = {(c.way.system, c.way.small, c.way.caching) for c in cases}
    assert {s[:2] for s in shortages} == {(way.system, way.small) for way in WAYS}
    cuts = {(cut_of(c.way.cut, prompt) - prompt) for c in cases for prompt, _ in LENGTHS}
    assert {0, -1} <= cuts


@pytest.mark.parametrize(
    "seed",
    [pytest.param(s, marks=pytest.mark.long if s else pytest.mark.slow) for s in range(24)],
)
def test_more_pairs_and_ways(
    seed: int,
    loader: Loader,
    expected: dict[str, list[Done]],
    tmp_path: Path,
) -> None:
    rng = random.Random(seed)
    pair = Pair(rng.choice(list(HEADS)), rng.choice(SIDES), rng.choice(SIDES))
    llm = loader.pair(pair)
    for number, way in enumerate(rng.sample(WAYS, 16)):
        check_case(Case(pair, way), llm, expected[pair.heads], tmp_path / str(number))


# One instance.

PLACES = {
    "tensor-parallel": ("three", {"g": {"devices": 2}}, {"group": "g"}),
    "three-stages": ("two", {"g": G | {"tensor_parallel_size": 1}}, [("g", 1), ("g", 1), ("g", 2)]),
    "two-groups": ("two", {"g": G, "h": H}, [("g", 3), ("h", 1)]),
    "there-and-back": ("three", {"g": G, "h": H}, [("g", 1), ("h", 2), ("g", 1)]),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n != "tensor-parallel")) for n in PLACES],
)
def test_one_instance_over_several_devices(
    name: str, loader: Loader, expected: dict[str, list[Done]], tmp_path: Path
) -> None:
    heads, groups, place = PLACES[name]
    if isinstance(place, list):
        place = {"stages": [{"group": group, "layers": layers} for group, layers in place]}
    stages = len(place.get("stages", ["one"]))
    system = "single" if name == "tensor-parallel" else "pipeline_parallel"
    instances = {"x": place | roomy(16)}
    llm = loader.load(heads, groups=groups, instances=instances, system=system)
    for caching, small in ((True, False), (False, True)):
        folder = tmp_path / f"{caching}-{small}"
        set_pools(llm, {"x": -(-PEAK // 16)} if small else {}, caching)
        for _ in range(2):
            assert serve(llm, run_dir=folder) == expected[heads]
        ran = Ran.last(folder)
        assert ran.metrics["late_compiles"] == 0
        assert {len(step.stages) for step in ran.record.steps} == {stages}
        if small:
            assert ran.metrics["preemptions"] > 0
        else:
            check_nothing_is_computed_twice(ran)
            pages = sum((prompt - 1) // 16 * 16 for prompt, _ in LENGTHS)
            assert ran.metrics["cached_tokens"] == caching * pages
