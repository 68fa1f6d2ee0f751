"""Aladdin's packing: figure 3, each constraint and the whole against brute force, the history."""

import math
import random
from collections.abc import Sequence
from itertools import product
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from jaxinfer.papers.aladdin.best_fit import (
    Job,
    Limits,
    Seen,
    WorkerAccount,
    best_fit,
    fits_alone,
    takes,
    to_open,
)
from jaxinfer.papers.aladdin.length_history import History
from jaxinfer.papers.aladdin.rebalance import Errors, rebalance, total
from jaxinfer.serving.admission import peak_entries
from jaxinfer.serving.step_fit import DecodeFit, PrefillFit

# In binary fractions, so that sums in any order are equal.
PREFILL, DECODE = PrefillFit(1 / 64, 1 / 4), DecodeFit(1 / 256, 1 / 32, 1 / 8)


def limits(**given: Any) -> Limits:
    usual = {"prefill": PREFILL, "decode": DECODE, "ttft_s": 1.0, "atgt_s": 1.0, "theta": 1.0,
             "gamma": 0.5, "room": 10**6, "page_size": 1}  # fmt: skip
    return Limits(**(usual | given))


LOOSE: dict[str, Any] = {"ttft_s": math.inf, "atgt_s": math.inf}


def job(prompt: int, output: int, name: str = "r", done: int = 0) -> Job:
    return Job(name, prompt, prompt + output - 1, output, output, done)


def worker_of(jobs: Sequence[Job], of: Limits, name: str = "w") -> WorkerAccount:
    worker = WorkerAccount(name, of)
    for number, each in enumerate(jobs):
        each.id = f"{name}{number}"
        worker.give(each)
    return worker


def nothing(worker: WorkerAccount) -> Seen:
    return Seen()


def peak(requests: Sequence[tuple[int, int]]) -> int:
    """Iteration by iteration: who has output left has an entry more in each."""
    most = 0
    for iteration in range(max((out for _, out in requests), default=0) + 1):
        most = max(most, sum(p + iteration for p, out in requests if iteration <= out))
    return most


# Figure 3: two workers of 9 entries, two requests of each kind.

FIGURE = [(4, 1), (1, 4), (4, 1), (1, 4)]


def test_figure_3() -> None:
    shortest_queue = [FIGURE[::2], FIGURE[1::2]]
    assert [peak(each) for each in shortest_queue] == [10, 10]
    workers = [WorkerAccount(name, limits(room=9, **LOOSE)) for name in "ab"]
    for prompt, output in FIGURE:
        new = job(prompt, output, f"{sum(len(w.jobs) for w in workers)}")
        chosen = best_fit(workers, new, nothing)
        assert chosen
        chosen.give(new)
    packed = [[(each.prompt, each.expected) for each in worker.jobs.values()] for worker in workers]
    assert [sorted(each) for each in packed] == [[(1, 4), (4, 1)]] * 2
    assert [peak_entries(each) for each in packed] == [7, 7]
    assert min(max(peak(a), peak(b)) for a, b in splits(FIGURE)) == 7


def splits(requests: Sequence[tuple[int, int]]) -> Any:
    for sides in product((0, 1), repeat=len(requests)):
        yield tuple([r for r, s in zip(requests, sides, strict=True) if s == n] for n in (0, 1))


def test_figure_3_has_no_other_lengths() -> None:
    """The figure's lengths are the only ones up to 8 of two kinds with the same two numbers."""
    found = []
    for a, b in product(range(1, 9), repeat=2):
        requests = [(a, b), (b, a)] * 2
        queues = max(peak([(a, b)] * 2), peak([(b, a)] * 2))
        if queues == 10 and min(max(map(peak, each)) for each in splits(requests)) == 7:
            found.append((a, b))
    assert found == [(1, 4), (4, 1)]


# Each constraint.


@given(batch=st.integers(1, 20), atgt=st.floats(0.2, 5))
def test_at_equation_4s_context_an_iteration_takes_the_target(batch: int, atgt: float) -> None:
    of = limits(atgt_s=atgt)
    assert DECODE.seconds(of.most_context(batch), batch) == pytest.approx(atgt)


def test_without_a_cost_of_context_the_batch_decides() -> None:
    of = limits(decode=DecodeFit(0.0, 0.25, 0.5))
    assert [of.most_context(n) for n in (1, 2, 3)] == [math.inf, math.inf, -math.inf]


JOBS = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), max_size=6)
NEW = st.tuples(st.integers(1, 12), st.integers(1, 12))


@examples(150)
@given(
    there=JOBS,
    dones=st.lists(st.integers(0, 15), min_size=6, max_size=6),
    new=NEW,
    size=st.sampled_from((1, 4)),
    room=st.integers(1, 120),
    waiting=st.integers(0, 40),
    slack=st.floats(-1, 3),
    theta=st.sampled_from((0.5, 0.75, 1.0)),
    gamma=st.sampled_from((0.0, 0.5, 1.0)),
)
def test_what_is_taken_keeps_all_constraints_and_what_is_not_breaks_one(
    there: list[tuple[int, int]], dones: list[int], new: tuple[int, int], size: int, room: int,
    waiting: int, slack: float, theta: float, gamma: float,
) -> None:  # fmt: skip
    of = limits(theta=theta, gamma=gamma, room=room, page_size=size, ttft_s=0.75)
    jobs = [job(*each) for each in there]
    worker = worker_of(jobs, of)
    for each, done in zip(jobs, dones, strict=False):
        worker.update(each, done, max(each.expected, done - 2))  # Some have outgrown it.
    one = job(*new)
    found = takes(worker, one, lambda _: Seen(waiting, slack))
    everyone = [*jobs, one]
    count = len(everyone)
    context = sum(each.prompt + gamma * max(each.expected, each.done) for each in everyone)
    b = context <= theta * (1.0 - 1 / 8 - count / 32) * 256
    seconds = (waiting + one.prompt) / 64 + 1 / 4
    c, d = seconds <= 0.75, seconds <= theta * slack
    held = [
        (each.prompt + each.done + size - 1, max(each.expected - each.done, 0)) for each in everyone
    ]
    e = peak(held) <= room and one.longest <= room
    assert found == (b and c and d and e)
    one.prefills = False
    assert takes(worker, one, lambda _: Seen(waiting, slack)) == (b and e)


@examples(60)
@given(steps=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9), st.integers(0, 9))))
def test_books_are_what_adding_up_says(steps: list[tuple[int, int, int]]) -> None:
    worker = WorkerAccount("w", limits())
    for number, prompt, output in steps:
        name = str(number)
        if name not in worker.jobs:
            worker.give(job(prompt, output + 1, name))
        elif output < 5:
            worker.update(worker.jobs[name], output, prompt)
        else:
            assert worker.take_back(name)
        assert worker.take_back("nobody") is None
        jobs = worker.jobs.values()
        context = sum(each.prompt + 0.5 * max(each.expected, each.done) for each in jobs)
        assert worker.context == context
        assert worker.norm == math.hypot(len(worker.jobs), context)
        assert worker.seconds == context / 256 + len(worker.jobs) / 32 + 1 / 8


def test_a_short_prediction_needs_room_for_its_limit_all_the_same() -> None:
    short = Job("r", prompt=5, longest=21, predicted=2, expected=2)
    assert takes(WorkerAccount("w", limits(room=21)), short, nothing)
    assert not takes(WorkerAccount("w", limits(room=20)), short, nothing)


def test_who_is_full_by_what_was_known_is_not_looked_at() -> None:
    def never(worker: WorkerAccount) -> Seen:
        raise AssertionError

    worker = worker_of([job(9, 9)] * 1, limits(atgt_s=0.25))
    assert not takes(worker, job(9, 9), never)


def test_what_a_look_tells_counts() -> None:
    """The request that is there turns out to be longer: (b) no longer holds."""
    there = job(20, 10)
    worker = worker_of([there], limits(atgt_s=0.5))

    def see(which: WorkerAccount) -> Seen:
        which.update(there, 80, 100)
        return Seen()

    assert takes(worker, job(20, 10), nothing)
    assert not takes(worker, job(20, 10), see)


# Algorithm 1.


def pack(jobs: Sequence[Job], of: Limits) -> list[WorkerAccount]:
    workers: list[WorkerAccount] = []
    for each in jobs:
        worker = best_fit(workers, each, nothing)
        if worker is None:
            worker = WorkerAccount(str(len(workers)), of)
            workers.append(worker)
        worker.give(each)
    return workers


def fewest(jobs: Sequence[Job], of: Limits) -> int:
    """The fewest over all partitions."""
    count = len(jobs)

    def fits(chosen: int) -> bool:
        here = [job(jobs[i].prompt, jobs[i].expected) for i in range(count) if chosen >> i & 1]
        last = here.pop()
        return takes(worker_of(here, of), last, nothing)

    feasible = [False, *(fits(chosen) for chosen in range(1, 1 << count))]
    least = [0] + [count + 1] * ((1 << count) - 1)
    for whole in range(1, 1 << count):
        part = whole
        while part:
            if feasible[part]:
                least[whole] = min(least[whole], least[whole ^ part] + 1)
            part = (part - 1) & whole
    return least[-1]


@examples(60)
@given(
    lengths=st.lists(NEW, min_size=1, max_size=7),
    room=st.integers(24, 40),
    atgt=st.floats(0.28, 0.6),
)
def test_best_fit_is_no_better_than_the_best_partition(
    lengths: list[tuple[int, int]], room: int, atgt: float
) -> None:
    of = limits(room=room, atgt_s=atgt)
    jobs = [job(*each, str(n)) for n, each in enumerate(lengths)]
    jobs = [each for each in jobs if takes(WorkerAccount("w", of), each, nothing)]
    if jobs:
        opened = len(pack(jobs, of))
        assert fewest(jobs, of) <= opened <= len(jobs)


@examples(60)
@given(sizes=st.lists(st.integers(1, 20), min_size=1, max_size=9))
def test_in_one_dimension_best_fit_keeps_its_known_bound(sizes: list[int]) -> None:
    """(b) alone, of contexts only: bins of 20. Best fit opens at most 1.7 times the fewest."""
    of = limits(decode=DecodeFit(1.0, 0.0, 0.5), atgt_s=20.5, gamma=0.0, ttft_s=math.inf)
    jobs = [job(each, 1, str(n)) for n, each in enumerate(sizes)]
    opened, least = len(pack(jobs, of)), fewest(jobs, of)
    assert math.ceil(sum(sizes) / 20) <= least <= opened <= math.floor(1.7 * least)


def test_the_fullest_first_and_of_equal_ones_the_first() -> None:
    empty = [WorkerAccount(name, limits()) for name in "ab"]
    half = worker_of([job(5, 5)], limits(), "h")
    full = worker_of([job(9, 9)], limits(), "f")
    assert best_fit([*empty, half, full], job(1, 1), nothing) is full
    no_room = worker_of([job(9, 9)], limits(room=10), "f")
    assert best_fit([*empty, half, no_room], job(1, 1), nothing) is half
    assert best_fit(empty, job(1, 1), nothing) is empty[0]
    assert best_fit(empty, job(200, 1), nothing) is None


def test_tokens_drown_requests_in_the_norm_as_printed() -> None:
    many = worker_of([job(1, 2) for _ in range(5)], limits(), "m")
    long = worker_of([job(12, 2)], limits(), "l")
    assert many.norm == math.hypot(5, 10)
    assert long.norm == math.hypot(1, 13)
    assert best_fit([many, long], job(1, 1), nothing) is long


# Opening.


def test_as_many_are_opened_as_the_waiting_ones_take() -> None:
    of = limits(room=20, **LOOSE)
    full = worker_of([job(10, 10)], of, "f")
    off = [WorkerAccount(name, of) for name in "xyz"]

    def opened(count: int, there: Sequence[WorkerAccount] = (full,)) -> int:
        found = to_open([job(5, 5, str(n)) for n in range(count)], there, off, nothing)
        assert found == [each.name for each in off[: len(found)]]
        return len(found)

    assert [opened(count) for count in (0, 1, 2, 3, 5, 50)] == [0, 1, 1, 2, 3, 3]
    assert opened(1, [WorkerAccount("free", of)]) == 0
    too_long = [job(30, 1, "long")]
    assert to_open(too_long, [], off, nothing) == ["x"]  # Nobody else is there.
    assert to_open(too_long, [WorkerAccount("free", of)], off, nothing) == []
    assert to_open([job(5, 5), *too_long], [], off, nothing) == ["x"]
    # (c) of those that are opened: their prompts wait for each other.
    hurried = [WorkerAccount(name, limits(ttft_s=0.5)) for name in "xyz"]
    assert len(to_open([job(9, 1, str(n)) for n in range(3)], [], hurried, nothing)) == 3


def test_alone() -> None:
    workers = [
        WorkerAccount("a", limits(ttft_s=0.5)),
        WorkerAccount("b", limits(room=5, ttft_s=2.0)),
    ]
    assert fits_alone(job(8, 1), workers)
    assert not fits_alone(job(17, 1), workers)
    assert fits_alone(job(8, 1), workers, late=0.125)
    assert not fits_alone(job(8, 1), workers, late=0.126)
    assert fits_alone(job(4, 1), workers, late=1.0)  # On the second.
    assert not fits_alone(job(4, 1), [])
    elsewhere = job(8, 1)
    elsewhere.prefills = False
    assert fits_alone(elsewhere, workers, late=9.0)


# Algorithm 2.


@examples(80)
@given(
    seed=st.integers(0, 10**6),
    counts=st.lists(st.integers(0, 2), min_size=3, max_size=3),
)
def test_rebalancing_against_all_reassignments(seed: int, counts: list[int]) -> None:
    """The result is checked with all 3^6 placements of at most six requests on three workers."""
    rng = random.Random(seed)
    fits = [DecodeFit(1 / 256, 1 / 8, 0.0), DecodeFit(1 / 128, 1 / 16, 0.0)]
    errors = {
        name: Errors(rng.choice(fits), rng.randint(-40, 40), rng.randint(-3, 3)) for name in "abc"
    }
    unstarted = {
        name: {f"{name}{n}": rng.randint(1, 40) for n in range(count)}
        for name, count in zip("abc", counts, strict=True)
    }
    refused = {name for name in "abc" if rng.random() < 0.2}
    where = {request: name for name, here in unstarted.items() for request in here}
    start = dict(where)

    def move(request: str, source: str, dest: str) -> bool:
        if dest in refused:
            return False
        assert where[request] == source
        where[request] = dest
        return True

    found = rebalance(errors, unstarted, move)

    def errors_at(places: dict[str, str]) -> dict[str, Errors]:
        moved = dict(errors)
        for request, name in places.items():
            predicted = unstarted[start[request]][request]
            moved[start[request]] = moved[start[request]].plus(predicted, -1)
            moved[name] = moved[name].plus(predicted)
        return moved

    assert found == errors_at(where)
    every = [dict(zip(where, names, strict=True)) for names in product("abc", repeat=len(where))]
    least = min(total(errors_at(places)) for places in every)
    assert least <= total(found) <= total(errors)
    assert not any(name in refused for r, name in where.items() if name != start[r])
    if where == start and not refused:
        # From the worst to its opposite, none helps.
        worst = max("abc", key=lambda name: errors[name].seconds)
        best = min("abc", key=lambda name: errors[name].seconds)
        for request in unstarted[worst]:
            assert total(errors_at(where | {request: best})) >= total(errors)


def test_one_move_that_ends_all_errors() -> None:
    fit = DecodeFit(1.0, 10.0, 0.0)
    errors = {"a": Errors(fit, 30, 1), "b": Errors(fit, -30, -1)}
    moved: list[tuple[str, str, str]] = []

    def move(*given: str) -> bool:
        moved.append(given)  # type: ignore[arg-type]
        return True

    found = rebalance(errors, {"a": {"r": 7, "s": 30}, "b": {"t": 30}}, move)
    assert moved == [("s", "a", "b")]
    assert total(found) == 0
    assert total(errors) == 80


def test_a_move_that_changes_nothing_is_not_made() -> None:
    """10 and -4 are off by as much as -4 and 10, and by more than -3 and 9."""
    fit = DecodeFit(1.0, 0.0, 0.0)
    errors = {"a": Errors(fit, 10, 0), "b": Errors(fit, -4, 0)}
    for predicted, expected in ((14, []), (13, ["r"])):
        moved = list[str]()
        rebalance(errors, {"a": {"r": predicted}}, lambda r, *_, moved=moved: not moved.append(r))
        assert moved == expected


# The predictor.


@examples(60)
@given(
    answers=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 30)), max_size=30),
    prompt=st.integers(1, 40),
    above=st.integers(0, 30),
)
def test_means_of_the_history(answers: list[tuple[int, int]], prompt: int, above: int) -> None:
    history = History()
    for each in answers:
        history.add(*each)
    same = [out for p, out in answers if math.floor(math.log2(p)) == math.floor(math.log2(prompt))]
    everyone = same or [out for _, out in answers]
    assert history.mean(prompt) == (round(fmean(everyone)) if everyone else None)
    longer = [out for out in same if out > above]
    found = history.mean_above(prompt, above)
    assert found == (round(fmean(longer)) if longer else None)
    assert found is None or found > above
