"""Heads to devices: against all placements, a MILP and closed forms."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from properties import examples
from scipy.optimize import Bounds, LinearConstraint, linprog, milp

from jaxinfer.papers.hetis.head_dispatch import (
    DeviceLoad,
    as_halves,
    can_do,
    dispatch,
    dispatch_by_memory,
    placed_anew,
)
from jaxinfer.serving.step_fit import AttentionFit

COEFFICIENT = st.sampled_from((0.0, 1.0, 2.0, 5.0, 11.0))


@st.composite
def fits(draw: st.DrawFn) -> AttentionFit:
    numbers = [draw(COEFFICIENT) for _ in range(5)]
    return AttentionFit(numbers[0], draw(st.sampled_from((0.1, 0.3, 1.0))), *numbers[2:])


@st.composite
def loads(draw: st.DrawFn, room: int = 30) -> DeviceLoad:
    pairs = draw(st.integers(0, 6))
    entries = pairs * draw(st.integers(1, 20))
    others, hidden = draw(COEFFICIENT), draw(st.sampled_from((None, 0.0, 3.0, 40.0)))
    return DeviceLoad(draw(fits()), pairs, entries, draw(st.integers(0, room)), 8, others, hidden)


def ideal_seconds(devices: Sequence[DeviceLoad]) -> float:
    """The least time in which all can be done, within 0.1 %, from below."""
    low, high = 0.0, max(load.seconds for load in devices)
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if can_do(middle, devices) else (middle, high)
    return low


def slowest(
    devices: Sequence[DeviceLoad], counts: Sequence[int], entries: float, pages: int
) -> float:
    after = [load.plus(n, entries, pages) for load, n in zip(devices, counts, strict=True)]
    return max(load.seconds for load in after)


@given(st.lists(loads(), min_size=1, max_size=4), st.integers(1, 5), st.integers(1, 20))
@examples(300)
def test_one_request_is_placed_as_well_as_by_trying_all(
    devices: list[DeviceLoad], slices: int, entries: int
) -> None:
    pages = -(-entries // 8)
    counts = dispatch(devices, slices, entries, pages)
    all_counts = [
        c
        for c in product(range(slices + 1), repeat=len(devices))
        if sum(c) == slices
        and all(n * pages <= load.free_pages for n, load in zip(c, devices, strict=True))
    ]
    if not all_counts:
        assert counts is None
        return
    assert counts is not None
    assert sum(counts) == slices
    assert tuple(counts) in all_counts
    best = min(slowest(devices, c, entries, pages) for c in all_counts)
    assert slowest(devices, counts, entries, pages) == pytest.approx(best)


def test_equal_devices_get_equal_heads() -> None:
    fit = AttentionFit(1.0, 0.1, 0.0)
    counts = dispatch([DeviceLoad(fit, 0, 0.0, 99)] * 3, 8, 10, 1)
    assert counts is not None
    assert sorted(counts) == [2, 3, 3]


def test_an_idle_device_costs_nothing_and_joins_once_it_pays() -> None:
    """The first head that pays is at G + g > beta + g_remote: by eqs. 3 and 4."""
    own, remote = AttentionFit(0.0, 1.0, 0.0), AttentionFit(0.0, 2.0, 0.0, 0.0, 100.0)
    devices = [DeviceLoad(own, 0, 0.0, 999), DeviceLoad(remote, 0, 0.0, 999)]
    assert DeviceLoad(remote, 0, 0.0, 9).seconds == 0
    # Slices of 10 entries: the twelfth would have the own device take 120, the other 120: a tie.
    assert dispatch(devices, 12, 10, 1) == [12, 0]
    assert dispatch(devices, 13, 10, 1) == [12, 1]


def test_by_memory_alone() -> None:
    slow = AttentionFit(9.0, 9.0, 9.0)
    fast = AttentionFit(1.0, 0.1, 0.0)
    devices = [DeviceLoad(fast, 3, 30.0, 6), DeviceLoad(slow, 0, 0.0, 11)]
    assert dispatch_by_memory(devices, 5, 2) == [1, 4]
    assert dispatch_by_memory(devices, 8, 2) == [3, 5]
    assert dispatch_by_memory(devices, 9, 2) is None


def by_milp(
    devices: Sequence[DeviceLoad], requests: Sequence[tuple[int, int]]
) -> tuple[float, float]:
    """Least time of the slowest device, from below and as found: eqs. 5 to 7, whole heads.

    Each request is slices and entries.

    Variables: heads of request j on device i, whether device i is in use, and the time.
    """
    D, R = len(devices), len(requests)
    num = D * R + D + 1
    cost = np.zeros(num)
    cost[-1] = 1
    rows, low, high = [], [], []
    for j, (slices, _) in enumerate(requests):
        row = np.zeros(num)
        row[j : D * R : R] = 1
        rows.append(row)
        low.append(slices)
        high.append(slices)
    total = sum(slices for slices, _ in requests)
    for i, load in enumerate(devices):
        fit, busy = load.fit, D * R + i
        row, used = np.zeros(num), np.zeros(num)
        for j, (_, entries) in enumerate(requests):
            row[i * R + j] = fit.per_pair + fit.exchange_per_pair + fit.per_entry * entries
            used[i * R + j] = 1
        row[busy], row[-1] = fit.constant + fit.exchange, -1
        rows.append(row)
        low.append(-np.inf)
        there = (fit.per_pair + fit.exchange_per_pair) * load.pairs + fit.per_entry * load.entries
        high.append(-there)
        used[busy] = -total
        rows.append(used)
        low.append(-np.inf)
        high.append(0)
    upper = np.array([*[np.inf] * (D * R), *[1.0] * D, np.inf])
    lower = np.array([*[0.0] * (D * R), *[float(load.pairs > 0) for load in devices], 0.0])
    kinds = np.array([1] * (D * R + D) + [0])
    found = milp(
        cost,
        constraints=LinearConstraint(np.array(rows), low, high),
        integrality=kinds,
        bounds=Bounds(lower, upper),
        options={"mip_rel_gap": 0.01, "time_limit": 10},
    )
    return float(found.mip_dual_bound), float(found.fun)


# A100 and two kinds that are slower: seconds of one layer, 13B (40 heads) in micro-seconds.
FAST, MIDDLE, SLOW = (
    AttentionFit(0.01, 3.8e-4, 5.0),
    AttentionFit(0.02, 7.9e-4, 6.0, 0.05, 60.0),
    AttentionFit(0.05, 1.0e-3, 8.0, 0.05, 100.0),
)


@pytest.mark.parametrize(
    ("kinds", "slices"),
    [((FAST, MIDDLE, MIDDLE), 40), ((FAST, FAST, MIDDLE, MIDDLE, MIDDLE, SLOW, SLOW, SLOW), 8)],
)
@pytest.mark.parametrize("count", [1, 4, 16])
def test_several_at_once_come_within_5_percent_of_a_milp(
    kinds: tuple[AttentionFit, ...], slices: int, count: int
) -> None:
    rng = np.random.default_rng(count)
    for _ in range(2):
        empty = [DeviceLoad(fit, 0, 0.0, 10**9) for fit in kinds]
        requests = [(slices, int(n)) for n in rng.integers(200, 9000, count)]
        devices = empty
        for number, entries in requests:
            counts = dispatch(devices, number, entries, 1)
            assert counts is not None
            devices = [load.plus(n, entries, 1) for load, n in zip(devices, counts, strict=True)]
        bound, best = by_milp(empty, requests)
        greedy = max(load.seconds for load in devices)
        assert bound * (1 - 1e-6) <= greedy <= 1.05 * bound
        assert ideal_seconds(devices) <= best * (1 + 1e-6)


@given(st.lists(loads(), min_size=1, max_size=4))
@examples(200)
def test_the_ideal_is_no_slower_than_any_placement(devices: list[DeviceLoad]) -> None:
    """The ideal is no slower than the present placement, or than all work on any one device."""
    pairs, entries = sum(load.pairs for load in devices), sum(load.entries for load in devices)
    assume(pairs)
    ideal = ideal_seconds(devices)
    assert 0 <= ideal <= max(load.seconds for load in devices)
    holding = [load for load in devices if load.capacity >= entries]
    anew = [replace(load, pairs=pairs, entries=entries) for load in holding]
    alone = min((load.seconds for load in anew), default=math.inf)
    assert ideal <= alone * (1 + 1e-9)


def test_the_ideal_of_two_devices_by_hand() -> None:
    """Entries split so that both end at once: T = (G + beta B_r) / (B_l + B_r)."""
    own, remote = AttentionFit(0.0, 1 / 4, 0.0), AttentionFit(0.0, 1 / 2, 0.0, 0.0, 100.0)
    devices = [DeviceLoad(own, 8, 8000.0, 0), DeviceLoad(remote, 0, 0.0, 9999)]
    assert ideal_seconds(devices) == pytest.approx((8000 + 100 * 2) / (4 + 2), rel=2e-3)
    # Too few entries for the exchange to pay.
    assert ideal_seconds([DeviceLoad(own, 8, 200.0, 0), devices[1]]) == pytest.approx(50, rel=2e-3)
    # A pool of 1,000 entries leaves 7,000 to the own device.
    small = DeviceLoad(remote, 0, 0.0, 1000)
    assert ideal_seconds([devices[0], small]) == pytest.approx(7000 / 4, rel=2e-3)


def test_a_pair_s_own_time_counts_in_the_ideal() -> None:
    """Pairs go where they cost little, entries where those do: 10 of 1 and 20 of 0.5."""
    by_pair, by_entry = AttentionFit(1.0, 100.0, 0.0), AttentionFit(100.0, 0.5, 0.0)
    devices = [DeviceLoad(by_pair, 10, 20.0, 0), DeviceLoad(by_entry, 0, 0.0, 99)]
    assert ideal_seconds(devices) == pytest.approx(10, rel=0.02)


def test_halves_hide_an_exchange_behind_the_dense_part_of_one_of_them() -> None:
    """The threshold is max(0, beta - dense time of half), instead of beta: by hand.

    A layer of halves takes 2 * half + own, or half + beta + what is elsewhere of one half.
    """
    own, remote = AttentionFit(0.0, 1.0, 0.0), AttentionFit(0.0, 2.0, 0.0, 0.0, 100.0)
    for half, alone in ((0.0, 11), (70.0, 4), (95.0, 1), (99.0, 1), (200.0, 0)):
        devices = [
            DeviceLoad(own, 0, 0.0, 999, hidden=0.0),
            DeviceLoad(remote, 0, 0.0, 999, hidden=half),
        ]
        # So many slices of 10 entries stay: one elsewhere takes a half's 10 after the exchange.
        counts = dispatch(devices, alone, 10, 1) if alone else [0, 0]
        assert counts == [alone, 0]
        counts = dispatch(devices, alone + 1, 10, 1)
        assert counts == [alone, 1]


def test_what_a_device_does_for_halves() -> None:
    """Twice its constant. 2 * 10 + 8 + 2 * 4 + 6 = 42 of both, so that one half is back after 71.

    Without 30 that the other half's dense part takes, these are 41. 42 are 12 more than twice 15.
    """
    fit = AttentionFit(2.0, 1.0, 4.0, 0.0, 50.0)
    load = DeviceLoad(fit, 10, 8.0, 0, others=6.0, hidden=30.0)
    assert load.seconds == 41.0
    assert replace(load, fit=replace(fit, exchange=0.0), hidden=15.0).seconds == 12.0
    assert replace(load, fit=replace(fit, exchange=0.0)).seconds == 0.0
    assert replace(load, hidden=None).seconds == 20 + 8 + 4 + 6 + 50
    assert replace(load, pairs=0).seconds == 0.0
    # What is left for pairs and entries within these seconds: the other way round.
    assert load.within(41.0) == 28.0
    assert replace(load, fit=replace(fit, exchange=0.0), hidden=15.0).within(12.0) == 28.0
    assert replace(load, hidden=None).within(88.0) == 28.0


def test_heads_are_placed_for_halves_where_that_is_faster() -> None:
    """8,000 entries at home, four or two in a second, and an exchange of 100, by closed forms.

    Whole: dense + (8000 + 200) / 6. Halves: o + 2 half is what is elsewhere / 2, so that
    o = (8000 - 4 half) / 6. With half of 300: 600 + 1133 beside 1366.7 and the dense part.
    """
    own, remote = AttentionFit(0.0, 1 / 4, 0.0), AttentionFit(0.0, 1 / 2, 0.0, 0.0, 100.0)
    loads = [DeviceLoad(own, 8, 8000.0, 0), DeviceLoad(remote, 0, 0.0, 9999)]
    assert as_halves(loads, 350.0, 300.0) == loads
    halves = as_halves(loads, 380.0, 300.0)
    assert [load.hidden for load in halves] == [0.0, 300.0]
    assert placed_anew(loads) == pytest.approx((8000 + 200) / 6, rel=1e-4)
    assert placed_anew(halves) == pytest.approx((8000 - 4 * 300) / 6, rel=1e-4)
    assert [load.plus(1, 5.0, 0).hidden for load in halves] == [0.0, 300.0]
    # Without anything there, or with so little that it is done in what weights cost twice: whole.
    empty = [replace(load, pairs=0, entries=0.0) for load in loads]
    assert as_halves(empty, 600.0, 300.0) == empty
    assert as_halves(loads, 0.0, 1000.0) == loads


@given(st.lists(loads(), min_size=1, max_size=3), st.integers(1, 6), st.integers(1, 20))
@examples(200)
def test_equal_slices_are_placed_anew_in_no_more_than_by_trying_all(
    devices: list[DeviceLoad], slices: int, entries: int
) -> None:
    """And in less by one slice at most, of which parts may go to several devices."""
    empty = [replace(load, pairs=0, entries=0.0) for load in devices]
    pages = -(-entries // 8)
    room = [load.free_pages // pages for load in empty]
    counts = [c for c in product(*(range(min(n, slices) + 1) for n in room)) if sum(c) == slices]
    assume(counts)
    best = min(slowest(empty, c, entries, pages) for c in counts)
    there = [load.plus(n, entries, 0) for load, n in zip(empty, counts[0], strict=True)]
    pools = [
        replace(load, free_pages=n - c, page_size=entries)
        for load, n, c in zip(there, room, counts[0], strict=True)
    ]
    found = placed_anew(pools)
    assert found <= best * (1 + 1e-3) + 1e-2
    fits = [load.fit for load in pools]
    slice_s = max(f.per_pair + f.exchange_per_pair + f.per_entry * entries for f in fits)
    assert best <= found + slice_s + 1e-2


@given(
    st.lists(loads(), min_size=1, max_size=4),
    st.sampled_from((0.05, 0.3, 0.6, 0.9, 1.3)),
    st.sampled_from((None, 0)),
)
@examples(400)
def test_what_can_be_done_is_what_a_linear_program_can(
    devices: list[DeviceLoad], share: float, free: int | None
) -> None:
    """Pairs and entries apart, each device within its seconds and its pool."""
    assume(any(load.pairs for load in devices))
    if free is not None:  # The first one attends for nothing.
        fit = replace(devices[0].fit, per_entry=0.0)
        devices = [replace(devices[0], fit=fit), *devices[1:]]
    seconds = share * max(load.seconds for load in devices)
    most = most_pairs(devices, seconds)
    pairs = sum(load.pairs for load in devices)
    assume(most is None or abs(most - pairs) > 1e-6)
    assert can_do(seconds, devices) == (most is not None and most > pairs)


def most_pairs(devices: Sequence[DeviceLoad], seconds: float) -> float | None:
    """Return the most pairs the devices can do beside all entries; None if those do not fit."""
    alive = [load for load in devices if load.within(seconds) >= 0]
    if not alive:
        return None
    D, limit = len(alive), 10.0**6
    times = np.zeros((D, 2 * D))
    for number, load in enumerate(alive):
        times[number, number] = load.fit.per_pair + load.fit.exchange_per_pair
        times[number, D + number] = load.fit.per_entry
    found = linprog(
        [-1.0] * D + [0.0] * D,
        A_ub=times,
        b_ub=[load.within(seconds) for load in alive],
        A_eq=[[0.0] * D + [1.0] * D],
        b_eq=[sum(load.entries for load in devices)],
        bounds=[(0, limit)] * D + [(0, load.capacity) for load in alive],
    )
    return -float(found.fun) if found.status == 0 else None


def test_a_page_more_for_each_slice_is_taken_from_the_free_ones() -> None:
    load = DeviceLoad(AttentionFit(1.0, 1.0, 0.0), 3, 20.0, 5, 8, others=2.0, hidden=4.0)
    grown = load.grown(2)
    assert grown == replace(load, entries=36.0, free_pages=3)
    assert grown.capacity == load.capacity == 60
