"""Aladdin's planner: eqs. 6 and 7 against scans and lines, the fewest workers of all counts."""

import math
import random
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import Carries, problem
from properties import examples

from jaxinfer import JaxinferError
from jaxinfer.config.run_file import RunFile, as_run_file
from jaxinfer.lab.plan.candidate import Candidate
from jaxinfer.lab.plan.file_parts import read_file, without_requests
from jaxinfer.lab.plan.search import DrivenSearch
from jaxinfer.papers.aladdin.planner import AladdinPlanner, AladdinPlannerOptions, WorkerSize
from jaxinfer.papers.aladdin.sizing import MeanRequest, WorkerCount, fit_workers, most_tokens
from jaxinfer.serving.step_fit import DecodeFit
from jaxinfer.simulate.cluster import fit_instance
from jaxinfer.simulate.run import prepare
from jaxinfer.workload.lengths import BenchRequest

MOST = 9
SIZES = ("1", "2", "4")
quick = examples(25)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("worker") / "worker.yaml"
    data = {
        "model": "none",
        "groups": {"g": {"kind": "A100-80G-SXM", "replicas": 3}},
        "instances": {"w": {"group": "g", "replicas": 3}},
        "system": "least_loaded",
    }
    path.write_text(yaml.safe_dump(data))
    return str(path)


def planner(file: str, **options: Any) -> AladdinPlanner:
    usual = {"file": file, "most": MOST, "sizes": {name: {} for name in SIZES}}
    return AladdinPlanner(AladdinPlannerOptions.model_validate(usual | options))


def search(rate: float = 1.0, **goal: Any) -> DrivenSearch:
    return DrivenSearch(
        problem({"minimise": "gpus", "rate": rate, "slo": "ttft=1,tpot=0.05"} | goal)
    )


def planned(planner: AladdinPlanner, search: DrivenSearch) -> Candidate:
    return planner.plan(search.problem, search)


def sizes_of(file: str, search: DrivenSearch, *names: str) -> list[WorkerSize]:
    """Eq. 6's choice is looked for among these."""
    options = {"sizes": {name: {} for name in names or SIZES}, "size": "all"}
    base = without_requests(read_file(file), {"model": "x"})
    return planner(file, **options)._sizes(search.problem, search, base, {"w": "g"})


def of(config: RunFile) -> tuple[int, int]:
    """GPUs of a worker, and workers."""
    groups = list(config.groups.values())
    return groups[0].devices, len(config.instances)


@pytest.mark.parametrize("kind", ["relative", "absolute"])
def test_a_worker_is_sized_by_the_fit_that_its_file_asks_for(file: str, kind: str) -> None:
    """A fit to squares of relative errors differs from one of seconds if few rows are quicker."""
    here = search()
    path = Path(file).with_name(f"{kind}.yaml")
    decode = [{"below": 5, "step_s": 0.002}, {"step_s": 0.02, "sequence_s": 1e-5}]
    phases = {"prefill": {"token_s": 1e-5, "pair_s": 0.0}, "decode": decode}
    data = yaml.safe_load(Path(file).read_text()) | {"simulate": {"fit": kind, "phases": phases}}
    path.write_text(yaml.safe_dump(data))
    (size,) = sizes_of(str(path), here, "1")
    config = as_run_file(here.problem.run_file(size.candidate(1).part))
    cluster = prepare(config)
    mean, room = MeanRequest.of(here.problem.work), cluster.instances["w0"].num_tokens
    worker = cluster.instances["w0"]
    lines = [fit_instance(worker, kind == each).decode for each in ("relative", "absolute")]
    found = [most_tokens(line, 1, room, mean, 0.05) for line in lines if line]
    assert size.most == found[0]
    assert found[0].by_target != pytest.approx(found[1].by_target, rel=1e-4)


# The fewest.


@given(
    seed=st.integers(0, 10**6),
    rate=st.floats(0.2, 14),
    size=st.sampled_from(["eq6", "all"]),
)
@quick
def test_the_fewest_are_those_of_all_counts(
    carries: Carries, file: str, seed: int, rate: float, size: str
) -> None:
    """Rates that grow with workers, whatever their size does."""
    rng = random.Random(seed)
    rates = {
        (int(gpus), count): total
        for gpus in SIZES
        for count, total in enumerate(accumulate(rng.uniform(0, 3) for _ in range(MOST)), 1)
    }
    carries.rate = lambda config: rates[of(config)]
    carries.tried.clear()
    here, asked = search(rate), planner(file, size=size)
    by_eq6 = sizes_of(file, here)
    chosen = max(by_eq6, key=lambda each: each.most.least).gpus
    looked = {gpus for gpus, _ in rates} if size == "all" else {chosen}
    enough = [at for at in rates if at[0] in looked and rates[at] >= rate]
    if not enough:
        with pytest.raises(JaxinferError, match="none of"):
            planned(asked, here)
        return
    best = planned(asked, here)
    gpus, workers = best.axes["gpus_per_worker"], best.axes["workers"]
    assert (gpus, workers) in enough
    assert gpus * workers == min(g * n for g, n in enough)
    tried = [of(config) for config, _ in carries.tried]
    assert len(set(tried)) == len(tried)
    # Of each size, no more than away from the guess in doubling steps, and a bisection.
    assert all(sum(g == of_size for g, _ in tried) <= 8 for of_size in looked)


def test_a_good_guess_takes_two_simulations(carries: Carries, file: str) -> None:
    """The number that eq. 6 says is enough is tried, and one less, which is not."""
    here, asked = search(), planner(file, sizes={"1": {}}, most=1000)
    (size,) = sizes_of(file, here, "1")
    rate = 7.5 * size.most.least / MeanRequest.of(here.problem.work).output
    here = search(rate)
    carries.rate = lambda config: of(config)[1] * rate / 7.5
    assert planned(asked, here).axes["workers"] == 8
    assert [of(config)[1] for config, _ in carries.tried] == [8, 7]


def test_the_file_s_own_size(carries: Carries, file: str) -> None:
    carries.rate = lambda config: 2.0 * of(config)[1]
    here = search(5.0)
    best = planned(planner(file, sizes={}), here)
    assert (best.axes["gpus_per_worker"], best.axes["workers"]) == (1, 3)
    config = RunFile.model_validate(here.problem.run_file(best.part))
    assert (of(config), config.model) == ((1, 3), "llama-3-8b")
    assert here.costs(best).gpus == 3


@pytest.mark.parametrize(
    ("goal", "options", "says"),
    [
        (
            {"maximise": "gpu", "minimise": None, "rate": None},
            {},
            "goal: this planner finds the fe",
        ),
        ({"requests_per_gpu": 4}, {}, r"goal\.requests_per_gpu: this planner needs the same"),
        ({"slo": "ttft=1"}, {}, r"goal\.slo: eq\. 6 needs tpot"),
        ({}, {"file": "nowhere.yaml"}, r"planner\.file: .*nowhere\.yaml"),
        ({}, {"sizes": {"3": {}}}, r"planner\.sizes\.3: "),
        (
            {},
            {"most": 1},
            "none of 1 candidates meets the targets",
        ),
    ],
)
def test_what_cannot_be_asked(
    carries: Carries, file: str, goal: dict[str, Any], options: dict[str, Any], says: str
) -> None:
    carries.rate = lambda config: 0.5
    with pytest.raises(JaxinferError, match=says) as raised:
        planned(planner(**({"file": file} | options)), search(**goal))
    assert "\n" not in str(raised.value)


def test_a_file_with_more_than_one_worker(carries: Carries, tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    path.write_text(yaml.safe_dump({"groups": {"g": {"kind": "A10"}, "h": {"kind": "A10"}}}))
    with pytest.raises(JaxinferError, match=r"two\.yaml has 0 instances and 2 groups, must have"):
        planned(planner(str(path)), search())


def test_sizes_are_numbers(file: str) -> None:
    with pytest.raises(JaxinferError, match=r"sizes\.two: must be a number of GPUs"):
        planner(file, sizes={"two": {}})


# Equation 6.


@given(
    per_context=st.floats(1e-8, 1e-5),
    per_sequence=st.floats(0, 1e-3),
    constant=st.floats(1e-3, 3e-2),
    gpus=st.sampled_from([1, 2, 4]),
    room=st.integers(2_000, 200_000),
    context=st.floats(50, 2000),
    target=st.floats(0.005, 0.1),
)
@quick
def test_equation_6_by_counting(
    per_context: float,
    per_sequence: float,
    constant: float,
    gpus: int,
    room: int,
    context: float,
    target: float,
) -> None:
    """The largest batches that fit, and that are in time, by trying one after the other."""
    fit = DecodeFit(per_context, per_sequence, constant)
    found = most_tokens(fit, gpus, room, MeanRequest(context, 100), target)
    held = room / context
    seconds = per_context * room + per_sequence * held + constant
    assert found.by_memory == pytest.approx(held / seconds / gpus)
    in_time = 0
    while fit.seconds((in_time + 1) * context, in_time + 1) <= target and in_time < 10**5:
        in_time += 1
    # In whole requests, one iteration after the other.
    assert in_time <= found.by_target * gpus * target + 1e-6
    assert in_time == 10**5 or found.by_target * gpus * target < in_time + 1 + 1e-6
    assert found.least == min(found.by_memory, found.by_target)


def test_where_the_target_binds_only_the_constant_tells_sizes_apart() -> None:
    """A step's work split N ways cancels N, so more GPUs win only by a smaller constant."""
    mean = MeanRequest(400, 100)

    def of_size(gpus: int, constant: float) -> float:
        fit = DecodeFit(4e-7 / gpus, 4e-5 / gpus, constant)
        return most_tokens(fit, gpus, 10**9, mean, 0.015).by_target

    assert of_size(1, 0.01) == pytest.approx(of_size(4, 0.01))
    assert of_size(2, 0.009) > of_size(1, 0.01)


def test_no_batch_keeps_a_target_below_the_constant() -> None:
    found = most_tokens(DecodeFit(1e-7, 0.0, 0.02), 1, 9999, MeanRequest(100, 9), 0.015)
    assert found.least == found.by_target == 0.0
    free = most_tokens(DecodeFit(0.0, 0.0, 0.01), 1, 1000, MeanRequest(100, 9), 0.015)
    assert (free.by_target, free.by_memory) == (math.inf, pytest.approx(1000))
    late = most_tokens(DecodeFit(0.0, 0.0, 0.02), 1, 1000, MeanRequest(100, 9), 0.015)
    assert late.by_target == 0.0


def test_the_mean_request_is_that_of_iterations() -> None:
    """Two requests: one has 1 token at 10, the other 3 at 20 to 23, in the mean at 21.5."""
    work = [BenchRequest(None, 10, 1, 0.0), BenchRequest(None, 20, 3, 0.0)]
    mean = MeanRequest.of(work)
    assert mean.context == pytest.approx((10.5 + 3 * 21.5) / 4)
    assert mean.output == 2.0


# Equation 7.


@given(per_rate=st.floats(0.1, 3), constant=st.floats(-1, 8))
@quick
def test_a_line_that_is_rounded_up_is_found_within_one(per_rate: float, constant: float) -> None:
    line = WorkerCount(per_rate, constant)
    rates = [3.0, 6.0, 12.0, 18.0, 25.0, 50.0]
    fitted = fit_workers([(rate, line.workers(rate)) for rate in rates])
    assert all(abs(fitted.workers(rate) - line.workers(rate)) <= 1 for rate in rates)


def test_the_line_of_the_dossier_s_counts() -> None:
    """Workers that a prototype opened at six rates; the line by hand."""
    found = [(3, 5), (6, 8), (12, 10), (18, 13), (25, 17), (50, 28)]
    fitted = fit_workers([(float(rate), count) for rate, count in found])
    assert fitted.per_rate == pytest.approx(703 / 1472)
    assert fitted.constant == pytest.approx(13 - 19 * 703 / 1472)
    assert WorkerCount(0.5, 1.0).workers(4.0) == 3  # Whole numbers are not rounded up.
    assert WorkerCount(0.5, -9.0).workers(4.0) == 1
    with pytest.raises(JaxinferError, match=r"eq\. 7: needs the workers of two rates"):
        fit_workers([(3.0, 5), (3.0, 5)])
