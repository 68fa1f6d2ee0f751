"""Aladdin's workers of several kinds: shares in dollars, which is opened, and the best packing."""

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from jaxinfer.config.run_file import as_run_file
from jaxinfer.errors import JaxinferError
from jaxinfer.papers.aladdin.best_fit import (
    Job,
    Limits,
    Seen,
    WorkerAccount,
    best_fit,
    takes,
    to_open,
)
from jaxinfer.papers.aladdin.system import Aladdin, AladdinOptions
from jaxinfer.serving.step_fit import DecodeFit, PrefillFit
from jaxinfer.systems.registry import make_system
from scripts.reproduce.aladdin.packing import by_rule, in_order, least_usd


def limits(slower: float = 1.0, **given: Any) -> Limits:
    """Return the limits of a worker whose steps take ``slower`` times as long."""
    usual: dict[str, Any] = {"ttft_s": 4.0, "atgt_s": 1.0, "theta": 0.75, "gamma": 0.5, "room": 400}
    prefill = PrefillFit(slower / 64, slower / 4)
    decode = DecodeFit(slower / 256, slower / 32, slower / 8)
    return Limits(prefill, decode, **(usual | given))


def job(prompt: int, output: int, name: str = "r") -> Job:
    return Job(name, prompt, prompt + output - 1, output, output)


def nothing(worker: WorkerAccount) -> Seen:
    return Seen()


# What a request's share of a worker costs.


@examples(60)
@given(
    prompt=st.integers(1, 40),
    output=st.integers(1, 40),
    slower=st.floats(0.5, 3),
    room=st.integers(80, 4000),
    size=st.sampled_from((1, 4)),
    usd=st.floats(0.1, 9),
)
def test_a_share_is_one_by_the_requests_that_a_worker_takes(
    prompt: int, output: int, slower: float, room: int, size: int, usd: float
) -> None:
    """A share of a worker is one by the number of requests that it takes, one after the other."""
    of = limits(slower, room=room, page_size=size, ttft_s=math.inf)
    worker, count = WorkerAccount("w", of, usd=usd), 0
    share = WorkerAccount("w", of, usd=usd).usd_of(job(prompt, output)) / usd
    while count < 200 and takes(worker, job(prompt, output), nothing):
        worker.give(job(prompt, output, str(count)))
        count += 1
    assert count < 200
    assert math.floor(1 / share + 1e-9) == count or math.ceil(1 / share - 1e-9) - 1 == count
    assert worker.usd_of(job(prompt, output)) == pytest.approx(usd * share)


def test_of_empty_workers_the_cheapest_share_comes_first_and_of_others_the_fullest() -> None:
    """Half as fast for a third of the price: for short prompts cheaper, too small for long ones."""
    large, small = (
        WorkerAccount("l", limits(), usd=3.0),
        WorkerAccount("s", limits(2.0, room=60), usd=1.0),
    )
    assert best_fit([large, small], job(4, 4), nothing) is small
    assert best_fit([large, small], job(50, 20), nothing) is large
    dear = WorkerAccount("s", limits(2.0, room=60), usd=2.0)
    assert best_fit([dear, large], job(4, 4), nothing) is large
    large.give(job(1, 1, "a"))
    assert best_fit([small, large], job(4, 4), nothing) is large
    small.give(job(9, 9, "b"))
    assert best_fit([small, large], job(4, 4), nothing) is small


def test_without_prices_the_largest_is_the_first() -> None:
    assert best_fit(
        [WorkerAccount("s", limits(2.0)), WorkerAccount("l", limits())], job(4, 4), nothing
    )
    chosen = best_fit(
        [WorkerAccount("s", limits(2.0)), WorkerAccount("l", limits())], job(4, 4), nothing
    )
    assert chosen
    assert chosen.name == "l"


KINDS = st.lists(
    st.tuples(
        st.sampled_from((0.75, 1.0, 1.5, 2.5)),
        st.sampled_from((60, 100, 300)),
        st.sampled_from((0.5, 1.0, 1.75, 3.0)),
    ),
    min_size=1,
    max_size=4,
)
LENGTHS = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=8)


def workers_of(kinds: Sequence[tuple[float, int, float]]) -> list[WorkerAccount]:
    return [
        WorkerAccount(str(number), limits(slower, room=room), usd=usd)
        for number, (slower, room, usd) in enumerate(kinds)
    ]


def jobs_of(lengths: Sequence[tuple[int, int]]) -> list[Job]:
    return [job(*each, str(number)) for number, each in enumerate(lengths)]


@examples(100)
@given(kinds=KINDS, lengths=LENGTHS, there=st.integers(0, 2))
def test_each_that_is_opened_was_the_cheapest_that_takes_the_request(
    kinds: list[tuple[float, int, float]], lengths: list[tuple[int, int]], there: int
) -> None:
    """A request after the other, and nothing is opened that an open one makes needless."""
    workers = workers_of(kinds)
    on, off = workers[:there], workers[there:]
    opened: list[WorkerAccount] = []
    left = list(off)
    for each in jobs_of(lengths):
        if any(takes(worker, each, nothing) for worker in on):
            continue
        waiting = [Seen(sum(j.prompt for j in worker.jobs.values())) for worker in opened]
        pairs = zip(opened, waiting, strict=True)
        worker = next((w for w, seen in pairs if takes(w, each, lambda _, s=seen: s)), None)
        if worker is None:
            able = [w for w in left if takes(w, each, nothing)]
            if not able and not on and not opened:
                able = left
            if not able:
                continue
            least = min(w.usd_of(each) for w in able)
            found = next(w for w in able if w.usd_of(each) == least)
            left.remove(found)
            worker = WorkerAccount(found.name, found.limits)
            opened.append(worker)
        worker.give(each)
    names = to_open(jobs_of(lengths), on, off, nothing)
    assert names == [worker.name for worker in opened]
    assert not any(worker.jobs for worker in off)


# Against the best packing.


def all_packings(jobs: Sequence[Job], workers: Sequence[WorkerAccount]) -> float | None:
    """Dollars of the cheapest of all, by trying each."""
    best = None
    for where in product(range(len(workers)), repeat=len(jobs)):
        usd = sum(workers[number].usd for number in set(where))
        if best is not None and usd >= best:
            continue
        if all(
            holds([j for j, n in zip(jobs, where, strict=True) if n == number], worker)
            for number, worker in enumerate(workers)
        ):
            best = usd
    return best


def holds(jobs: Sequence[Job], worker: WorkerAccount) -> bool:
    """(b), (c), (e) as they are printed, iteration by iteration."""
    if not jobs:
        return True
    of = worker.limits
    context = sum(each.prompt + of.gamma * each.predicted for each in jobs)
    prompts = sum(each.prompt for each in jobs)
    peak = max(
        sum(each.prompt + step for each in jobs if step <= each.predicted)
        for step in range(max(each.predicted for each in jobs) + 1)
    )
    return (
        context <= of.theta * of.most_context(len(jobs))
        and of.prefill.seconds(prompts) <= of.ttft_s
        and peak <= of.room
    )


@examples(25)
@given(kinds=KINDS.filter(lambda kinds: len(kinds) < 4), lengths=LENGTHS.map(lambda x: x[:5]))
def test_the_program_finds_the_cheapest_of_all_packings(
    kinds: list[tuple[float, int, float]], lengths: list[tuple[int, int]]
) -> None:
    jobs, workers = jobs_of(lengths), workers_of(kinds)
    assert least_usd(jobs, workers) == pytest.approx(all_packings(jobs, workers))


@examples(40)
@given(kinds=KINDS, lengths=LENGTHS)
def test_no_rule_is_cheaper_than_the_program(
    kinds: list[tuple[float, int, float]], lengths: list[tuple[int, int]]
) -> None:
    least = least_usd(jobs_of(lengths), workers_of(kinds))
    for rule in (by_rule, in_order):
        found = rule(jobs_of(lengths), workers_of(kinds))
        if found is not None:
            assert least is not None
            assert least <= found + 1e-9
            assert found <= sum(usd for _, _, usd in kinds)


# Prices in a run file.


def test_prices_of_replicas_are_those_of_their_name() -> None:
    """A price is for all replicas of its name, even where another name begins alike."""
    kinds = {"a10": 12, "a100_": 3}
    config = as_run_file(
        {
            "model": "llama-2-7b",
            "groups": {name: {"replicas": count} for name, count in kinds.items()} | {"h": {}},
            "instances": {n: {"group": n, "replicas": count} for n, count in kinds.items()}
            | {"h": {"group": "h"}},
            "system": {
                "name": "aladdin",
                "ttft_s": 1.0,
                "atgt_s": 1.0,
                "usd_per_hour": {"a10": 1.0, "a100_": 2.0, "h": 3.0},
            },
        }
    )
    system = make_system(config.system, config.instances)
    assert isinstance(system, Aladdin)
    usd = {name: system.options.usd(name) for name in config.instances}
    assert usd == {f"a10{n}": 1.0 for n in range(12)} | {f"a100_{n}": 2.0 for n in range(3)} | {
        "h": 3.0
    }


@pytest.mark.parametrize(
    ("usd", "says"),
    [
        ({"a": 1.0}, r"usd_per_hour: has none of 'b', must have all or none"),
        ({"a": 1.0, "b": 1.0, "a0": 1.0}, r"usd_per_hour\.a0: no worker: did you mean 'a'"),
        ({"a": 1.0, "b": 1.0, "p": 1.0}, r"usd_per_hour\.p: no worker: known: a, b"),
        ({"a": 1.0, "b": 1.0, "bb": 1.0}, r"usd_per_hour\.bb: no worker: did you mean 'b'"),
        ({"a": 1.0, "b": 0.0}, r"usd_per_hour\.b"),
    ],
)
def test_prices_that_cannot_be(usd: dict[str, float], says: str) -> None:
    given = {"ttft_s": 1.0, "atgt_s": 1.0, "prefill": "p", "usd_per_hour": usd}

    def check() -> None:
        Aladdin(AladdinOptions.model_validate(given)).check("abp")

    with pytest.raises(JaxinferError, match=says):
        check()
