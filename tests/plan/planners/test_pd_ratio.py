"""Ratios of prefill to decode instances: closed forms beside what is simulated."""

import math
from pathlib import Path
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import RUN, Linear, problem

from jaxinfer.lab.plan.candidate import Candidate
from jaxinfer.lab.plan.planners.pd_ratio import (
    UTILISATION,
    PDRatio,
    PDRatioOptions,
    PhaseRates,
    allowances,
    decode_rate,
    finite_rate,
    mixed_rate,
    packed_rate,
    prefill_rate,
)
from jaxinfer.lab.plan.problem import Problem
from jaxinfer.lab.plan.search import DrivenSearch
from jaxinfer.simulate.targets import PercentileTargets, Reference, RequestTargets, gap_limits
from jaxinfer.workload.lengths import BenchRequest

lengths = st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 500)), min_size=1, max_size=6)


def work_of(pairs: list[tuple[int, int]]) -> list[BenchRequest]:
    return [BenchRequest(None, prompt, output, 0.0) for prompt, output in pairs]


@given(lengths, st.integers(1, 4000))
def test_prompts_one_by_one(pairs: list[tuple[int, int]], budget: int) -> None:
    seconds = mean(-(-p // budget) * Linear.step_s + p * Linear.token_s for p, _ in pairs)
    assert prefill_rate(Linear(), work_of(pairs), budget) == pytest.approx(1 / seconds)


@given(lengths, st.integers(1, 4000))
def test_prompts_of_a_queue_fill_each_step(pairs: list[tuple[int, int]], budget: int) -> None:
    tokens = sum(p for p, _ in pairs)
    seconds = -(-tokens // budget) * Linear.step_s + tokens * Linear.token_s
    assert packed_rate(Linear(), work_of(pairs), budget) == pytest.approx(len(pairs) / seconds)


@given(st.floats(0.1, 50), st.integers(1, 1000), st.floats(0.01, 20), st.floats(0.05, 1))
def test_few_requests_may_come_faster_than_they_are_served(
    rate: float, count: int, late: float, share: float
) -> None:
    most = finite_rate(rate, count, late, share)
    # Served from the first arrival on, so many of them are done when the last has come and waited.
    came = 0 if math.isinf(most) else count / most
    waits = share * count / rate - came
    assert waits == pytest.approx(late) or (math.isinf(most) and waits <= late)


WORK = [BenchRequest(None, 10, 5, 0.0), BenchRequest(None, 10, 21, 0.0)]


def test_until_when_targets_let_requests_wait() -> None:
    percentiles = PercentileTargets([("ttft", 90, 2.0), ("tpot", 80, 0.1), ("tbt", 99, 0.2)])
    # 20 gaps of 0.1 s after the first token, for who keeps both.
    first, last = allowances(percentiles, WORK)
    assert first == [(2.0, 0.9)]
    assert last == [(pytest.approx(4.0), pytest.approx(0.7))]
    each = RequestTargets({"ttft": 1.0, "tbt": 0.2, "normalised": 0.3, "delay": 9.0}, 0.95)
    first, last = allowances(each, WORK)
    assert first == [(1.0, 0.95), (pytest.approx(6.3), 0.95)]
    assert last == [(pytest.approx(6.3), 0.95), (pytest.approx(5.0), pytest.approx(0.9))]
    # One gap of a hundred may be as long as it likes, and so may half of all requests.
    assert allowances(PercentileTargets([("ttft", 90, 2.0), ("tbt", 99, 0.2)]), WORK)[1] == []
    halves = PercentileTargets([("ttft", 50, 2.0), ("tpot", 50, 0.1)])
    assert allowances(halves, WORK) == ([(2.0, 0.5)], [])


def test_who_keeps_no_limit_may_be_decoded_faster() -> None:
    assert mixed_rate(2.0, 6.0, 0.75) == pytest.approx(1 / (0.75 / 2 + 0.25 / 6))
    assert mixed_rate(2.0, 6.0, 1.0) == 2
    assert mixed_rate(0.0, 6.0, 0.75) == 6
    assert mixed_rate(math.inf, math.inf, 0.75) == math.inf


@given(st.integers(1, 2000), st.integers(2, 500), st.floats(0.05, 0.95))
def test_the_steady_batch_of_decodes(prompt: int, output: int, load: float) -> None:
    """T = w / (1 - q L_out k): at the rate of batch B the step takes as long as B of them do."""
    w, k = Linear.step_s, Linear.token_s + Linear.entry_s * (prompt + output / 2)
    limit = w / (1 - load)  # The step at which q L_out k is this load.
    batch = int((limit - w) / k + 1e-9)
    rate = decode_rate(Linear(), work_of([(prompt, output)]), 10**6, 10**12, limit)
    if not batch:
        assert rate == 0
        return
    step = w + k * batch
    # The first token is of the prefill instance.
    assert rate == pytest.approx(batch / step / (output - 1), rel=1e-3)
    assert w / (1 - rate * (output - 1) * k) == pytest.approx(step, rel=2e-3)


def test_seats_and_memory_bound_the_batch() -> None:
    work = work_of([(100, 100)])
    k = Linear.token_s + Linear.entry_s * 150
    for most, entries in ((8, 10**9), (10**6, 8 * 150)):
        step = Linear.step_s + 8 * k
        assert decode_rate(Linear(), work, most, entries, None) == pytest.approx(8 / step / 99)
    assert decode_rate(Linear(), work_of([(100, 1)]), 8, 10**9, None) == math.inf


@given(st.integers(1, 9), st.integers(1, 9), st.floats(0.1, 9), st.floats(0.1, 9))
def test_more_instances_never_carry_less(p: int, d: int, prefill: float, decode: float) -> None:
    rates = PhaseRates(prefill, decode)
    assert rates.of(p, d) == min(UTILISATION * p * prefill, d * decode)
    assert rates.of(p + 1, d) >= rates.of(p, d) <= rates.of(p, d + 1)


def test_the_limit_of_a_token_is_the_tightest_that_speaks_of_it() -> None:
    both = RequestTargets({"ttft": 1, "tbt": 0.2, "tpot": 0.1}, 0.95)
    assert gap_limits(both) == [("tpot", 0.1, 0.95), ("tbt", 0.2, 0.95)]
    percentiles = PercentileTargets([("ttft", 90, 1.0), ("tbt", 99, 0.3)])
    assert gap_limits(percentiles) == [("tbt", 0.3, 0.99)]
    assert gap_limits(RequestTargets({"ttft": 1})) == []
    assert gap_limits(RequestTargets({"tbt": 2}, reference=Reference({}))) == []


OPTIONS = {
    "prefill": {"kind": "A100-80G-SXM", "most": 2, "engine": {"max_num_batched_tokens": 8192}},
    "decode": {"kind": "A10", "most": 3, "tensor_parallel": [1, 2]},
}


def asked(count: int, **goal: object) -> Problem:
    work = {"synthetic": {"lengths": "azure_conversation", "count": count, "seed": 0}}
    engine = {"max_model_len": 8192, "max_num_seqs": 64, "enable_prefix_caching": False}
    run = RUN | {"workload": work, "engine": engine}
    goal = {"slo": "ttft:p90=2,tbt:p99=0.2", "precision": 0.1, "at_once": 2} | goal
    return problem(goal, {"name": "pd_ratio", **OPTIONS}, run=run)


def test_short_prompts_share_steps(tmp_path: Path) -> None:
    """An A10 prefills 60 of them a second, of which it could do 22 one by one."""
    trace = tmp_path / "short.csv"
    rows = "".join(f"{16 + i * 7 % 49},{2 + i * 3 % 19}\n" for i in range(400))
    trace.write_text("num_prefill_tokens,num_decode_tokens\n" + rows)
    run = asked(1, maximise="gpu").run | {"workload": {"trace": str(trace)}}
    goal = {"minimise": "gpus", "rate": 60.0, "slo": "ttft:p90=1,tbt:p99=0.2"}
    options = {
        "prefill": {"kind": "A10", "most": 3},
        "decode": {"kind": "A100-80G-SXM", "most": 1},
    }
    search = DrivenSearch(problem(goal, {"name": "pd_ratio", **options}, run=run))
    best = PDRatio(PDRatioOptions.model_validate(options)).plan(search.problem, search)
    assert best.axes["prefills"] == 1
    assert float(best.axes["closed_form"] or 0) * 1.5 < 60


@pytest.mark.parametrize("gpus", [2, 4, 5, 12])
def test_no_more_gpus_than_there_are(gpus: int) -> None:
    """The sides have degrees 1, and 1 and 2."""
    options = PDRatioOptions.model_validate(OPTIONS | {"gpus": gpus})
    found = [c.axes for c in PDRatio(options).candidates(asked(1, maximise="gpu"))]
    wanted = {(p, d, tp) for p in (1, 2) for d in (1, 2, 3) for tp in (1, 2) if p + d * tp <= gpus}
    assert {(a["prefills"], a["decodes"], a["decode_tp"]) for a in found} == wanted


@pytest.mark.parametrize(
    ("count", "goal"),
    [
        (60, {"minimise": "gpus", "rate": 4.0}),
        # Of so few that an overload has built no queue, the closed forms know better.
        (500, {"minimise": "watts", "rate": 9.0}),
    ],
)
def test_the_choice_is_that_of_brute_force(count: int, goal: dict[str, object]) -> None:
    planner = PDRatio(PDRatioOptions.model_validate(OPTIONS))
    chosen: list[Candidate] = []
    simulated = []
    for prune in (True, False):
        search = DrivenSearch(asked(count, **goal), prune=prune)
        chosen.append(planner.plan(search.problem, search))
        simulated.append(sum(bool(s.figures) for _, s in search.tried.values()))
        assert len(search.tried) == 2 * 3 * 2
    assert chosen[0].axes == chosen[1].axes
    assert simulated[0] < simulated[1]


def test_closed_forms_are_of_the_requests_that_a_candidate_serves(tmp_path: Path) -> None:
    """Of a trace that drifts, the rates are those of a trace that ends after these requests."""
    head, rows = "num_prefill_tokens,num_decode_tokens\n", ["128,128\n"] * 300
    options = {"prefill": {"kind": "A10", "most": 2}, "decode": {"kind": "A10", "most": 3}}
    found = []
    for name, lines in (("drifts", rows + ["3500,4\n"] * 1000), ("short", rows)):
        (tmp_path / name).with_suffix(".csv").write_text(head + "".join(lines))
        run = RUN | {"engine": {"max_model_len": 4096, "enable_prefix_caching": False}}
        run |= {"workload": {"trace": str(tmp_path / f"{name}.csv")}}
        goal = {"maximise": "gpu", "slo": "ttft=1.0,tpot=0.2", "requests_per_gpu": 60, "at_once": 1}
        asked = problem(goal, {"name": "pd_ratio", **options}, run=run)
        planner, search = PDRatio(PDRatioOptions.model_validate(options)), DrivenSearch(asked)
        best = planner.plan(asked, search)
        bounds = [planner.most(candidate) for candidate, _ in search.tried.values()]
        found.append((best.axes, [c.axes for c, _ in search.tried.values()], bounds))
    assert found[0] == found[1]
    # 1P3D carries 11.3 per GPU, and 2P1D, which the long prompts need most, 4.6.
    assert (found[0][0]["prefills"], found[0][0]["decodes"]) == (1, 3)


def test_without_enough_requests_there_is_no_closed_form() -> None:
    """The search says why it cannot be."""
    options = PDRatioOptions.model_validate(SMALL)
    lacks = asked(5, maximise="gpu", requests_per_gpu=2)
    planner = PDRatio(options)
    forms = {
        (c.axes["prefills"], c.axes["decodes"]): (c.axes["closed_form"], planner.most(c))
        for c in planner.candidates(lacks)
    }
    assert forms[2, 2] == (None, math.inf)
    assert forms[1, 1][0]


@pytest.mark.parametrize(
    ("slo", "outputs"),
    [
        ("ttft:p90=2,tbt:p99=0.2", 0),
        ("ttft:p90=0.5,tpot:p90=0.05", 1),
        ("ttft:p90=0.5,tpot:p90=0.05", 2),
        ("ttft=0.5,tbt=0.2", 20),
        *(
            pytest.param(slo, 0, marks=pytest.mark.slow)
            for slo in (
                "ttft:p90=0.5,tpot:p90=0.05",
                "ttft:p50=0.5,tpot:p50=0.05",
                "normalised:p90=0.1",
                "e2e:p90=20",
            )
        ),
    ],
)
def test_none_carries_more_than_its_bound(slo: str, outputs: int, tmp_path: Path) -> None:
    """Simulated rates stay within the bound, for Azure's output lengths or a given one."""
    run = asked(80, maximise="cluster").run
    if outputs:
        trace = tmp_path / "t.csv"
        rows = "".join(f"{200 + i * 397 % 2000},{outputs}\n" for i in range(80))
        trace.write_text("num_prefill_tokens,num_decode_tokens\n" + rows)
        run = run | {"workload": {"trace": str(trace)}}
    goal = {"maximise": "cluster", "slo": slo, "precision": 0.2}
    planner = PDRatio(PDRatioOptions.model_validate(SMALL))
    search = DrivenSearch(problem(goal, {"name": "pd_ratio", **SMALL}, run=run), prune=False)
    candidates = list(planner.candidates(search.problem))
    scores = search.scores(candidates)
    for candidate, score in zip(candidates, scores, strict=True):
        assert 0 < score.rate <= planner.most(candidate)


SMALL = {
    "prefill": {"kind": "A100-80G-SXM", "most": 2, "engine": {"max_num_batched_tokens": 8192}},
    "decode": {"kind": "A10", "most": 2},
}
