"""Sizes of pools for prefill, attention and FFN: the closed form beside what is simulated."""

from typing import Any

import pytest
from plan_cases import RUN, problem

from jaxinfer.config.resolve import resolve
from jaxinfer.config.run_file import as_run_file
from jaxinfer.config.site import model_site
from jaxinfer.errors import JaxinferError
from jaxinfer.lab.plan.problem import Problem
from jaxinfer.lab.plan.search import DrivenSearch
from jaxinfer.papers.hexgen3.planner import HexGen3Options, HexGen3Planner, LeastTimes
from jaxinfer.serving.batch import Work
from jaxinfer.simulate.cluster import model_cluster
from jaxinfer.simulate.ffn import ModelledFfnStage

SMALL: dict[str, Any] = {
    "prefill": {"kind": "A100-80G-SXM", "most": 2, "engine": {"max_num_batched_tokens": 8192}},
    "attention": {"kind": "A10", "devices": [1, 2]},
    "ffn": {"kind": "A100-80G-SXM", "devices": [1, 2]},
    "pairs": 2,
    "micro_batches": [1, 4],
    "gpus": 5,
}


def asked(slo: str, count: int, **goal: object) -> Problem:
    work = {"synthetic": {"lengths": "azure_conversation", "count": count, "seed": 0}}
    engine = {"max_model_len": 8192, "max_num_seqs": 64, "enable_prefix_caching": False}
    run = RUN | {"workload": work, "engine": engine}
    goal = {"maximise": "gpu", "slo": slo, "precision": 0.1} | goal
    return problem(goal, {"name": "hexgen3", **SMALL}, run=run)


def planner() -> HexGen3Planner:
    return HexGen3Planner(HexGen3Options.model_validate(SMALL))


def test_candidates_are_all_sizes_with_enough_gpus() -> None:
    found = list(planner().candidates(asked("ttft:p90=2", 4)))
    sizes = {
        (prefills, pairs, attention, ffn, parts)
        for prefills in (1, 2)
        for pairs in (1, 2)
        for attention in (1, 2)
        for ffn in (1, 2)
        for parts in (1, 4)
        if prefills + pairs * (attention + ffn) <= 5
    }
    names = ("prefills", "pairs", "attention", "ffn", "micro_batches")
    assert {tuple(each.axes[name] for name in names) for each in found} == sizes
    assert len({each.key for each in found}) == len(found) == len(sizes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"micro_batches": [1, 0]}, r"micro_batches\[1\] is 0, must be greater than or equal to 1"),
        ({"attention": {"kind": "A10", "devices": [0]}}, r"attention\.devices\[0\] is 0, must be"),
        ({"engine": {"micro_batches": 4}}, "engine.micro_batches: leave it out, the planner sets"),
        (
            {"prefill": {"kind": "A10", "most": 1, "engine": {"replicas": 2}}},
            "prefill.engine.replicas: leave it out, the planner sets it",
        ),
    ],
)
def test_what_it_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(JaxinferError, match=message):
        HexGen3Options.model_validate(SMALL | change)


def test_padded_steps_have_the_closed_form_of_those_that_are_not() -> None:
    """Only steps with prompts are padded, and a lower bound may leave that out."""
    options = HexGen3Options.model_validate(SMALL | {"engine": {"token_buckets": [256, 512]}})
    padded = list(HexGen3Planner(options).candidates(given := asked("ttft:p90=2", 4)))
    plain = list(planner().candidates(given))
    assert [each.axes for each in padded] == [each.axes for each in plain]
    assert all(each.axes["closed_form"] for each in padded)


def test_a_run_file_has_a_group_for_each_side_of_each_pair() -> None:
    candidates = planner().candidates(given := asked("ttft:p90=2", 4))
    candidate = next(each for each in candidates if each.axes["pairs"] == 2)
    cluster = resolve(as_run_file(given.run_file(candidate.part))).cluster
    decodes = {name: each for name, each in cluster.instances.items() if each.ffn_groups}
    assert {name: each.ffn_groups for name, each in decodes.items()} == {
        "decode0": ["ffn0"],
        "decode1": ["ffn1"],
    }
    assert {place.group for each in decodes.values() for place in each.places} == {
        "attention0",
        "attention1",
    }


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_no_number_of_micro_batches_is_faster_than_the_closed_form(parts: int) -> None:
    """Requests have long and short contexts in equal shares, on a slow or a fast link."""
    for gb_s in (0.5, 50):
        options = HexGen3Options.model_validate(SMALL | {"exchange_gb_s": gb_s})
        given = asked("ttft:p90=2", 4)
        candidate = next(HexGen3Planner(options).candidates(given))
        site = model_site(resolve(as_run_file(given.run_file(candidate.part))))
        (stage,) = model_cluster(site).instances["decode0"].cost.parts  # type: ignore[attr-defined]
        assert isinstance(stage, ModelledFfnStage)
        for rows, context in ((8, 200), (64, 3000)):
            part = Work(rows, rows, rows, rows, rows * context, [], rows)
            total = rows * parts
            work = Work(total, total, total, total, total * context, [], total)
            work.halves = [part] * parts if parts > 1 else ()
            (least,) = LeastTimes([stage]).stages(work)
            assert least <= stage.seconds(work) * (1 + 1e-12)
            assert least > stage.attention.besides(work) > 0


@pytest.mark.slow
@pytest.mark.parametrize("slo", ["ttft:p90=0.5,tpot:p90=0.05", "ttft=0.5,tbt=0.2"])
def test_none_carries_more_than_its_bound_and_the_best_is_found(slo: str) -> None:
    """The search with the bound ends at a candidate that none exceeds when all are simulated."""
    given = asked(slo, 20, precision=0.3)
    few = {"attention": {"kind": "A10"}, "ffn": {"kind": "A100-80G-SXM"}}
    options = HexGen3Options.model_validate(SMALL | few)
    made = HexGen3Planner(options)
    every = DrivenSearch(given, prune=False)
    candidates = list(made.candidates(given))
    scores = every.scores(candidates)
    per_gpu = {}
    for candidate, score in zip(candidates, scores, strict=True):
        assert not score.refused
        assert score.rate <= made.most(candidate)
        assert score.costs
        per_gpu[candidate.key] = score.rate / score.costs.gpus
    best = HexGen3Planner(options).plan(given, DrivenSearch(given))
    assert per_gpu[best.key] >= 0.75 * max(per_gpu.values()) > 0
