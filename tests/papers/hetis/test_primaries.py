"""Hetis' choice of GPUs with layers: Table 1's, large pools, and against all choices."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from jaxinfer.papers.hetis.primaries import ShareRule, groupings, primaries, seconds_of, splits_of

# A100-80, 3090, P100: Table 1's columns of prefill and decode times.
PREFILL, DECODE = (0.06, 0.147, 1.47), (0.0097, 0.0143, 0.077)
# Five kinds with 32 GPUs of each.
SPEEDS = (1, 0.5, 0.25, 0.12, 0.06)


@pytest.mark.parametrize("rule", ["cumulative", "stepwise"])
def test_the_paper_s_placement_follows_from_table_1(rule: ShareRule) -> None:
    """Section 7.2: A100 and 3090 have layers, P100 have none."""
    assert primaries((4, 4, 4), PREFILL, 0.05, rule) == [4, 4, 0]
    # By hand: 96.6, 93.9 and 87.1 layers per second with all, without P100, without one 3090 more.
    rates = [1 / seconds_of(left, PREFILL) for left in ((4, 4, 4), (4, 4, 0), (4, 3, 0))]
    assert rates == pytest.approx([96.60, 93.88, 87.07], abs=0.01)


def test_decode_times_and_the_two_rules_differ() -> None:
    assert primaries((4, 4, 4), DECODE, 0.05, "stepwise") == [4, 4, 0]
    assert primaries((4, 4, 4), DECODE, 0.05, "cumulative") == [4, 4, 2]


def test_step_by_step_a_large_pool_is_stripped() -> None:
    counts, seconds = [32] * 5, [1 / speed for speed in SPEEDS]
    assert primaries(counts, seconds, 0.05, "stepwise") == [20, 0, 0, 0, 0]
    assert primaries(counts, seconds, 0.05, "cumulative") == [32, 32, 32, 24, 0]


@pytest.mark.parametrize(
    ("most", "kept"), [(0.01, [4, 4, 3]), (0.03, [4, 4, 0]), (0.1, [4, 4, 0]), (0.12, [4, 3, 0])]
)
def test_more_goes_out_the_more_may_be_lost(most: float, kept: list[int]) -> None:
    """Shares by hand: a P100 is 0.7 %, four 2.9 %, a 3090 more 10.9 %."""
    assert primaries((4, 4, 4), PREFILL, most, "cumulative") == kept


@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.sampled_from((1.0, 2.0, 3.0, 7.0, 30.0))),
        min_size=1,
        max_size=3,
        unique_by=lambda kind: kind[1],
    ),
    st.sampled_from((0.0, 0.05, 0.3, 2.0)),
)
@examples(100)
def test_as_few_stay_as_any_choice_of_the_slowest_first_allows(
    kinds: list[tuple[int, float]], most: float
) -> None:
    counts, seconds = zip(*kinds, strict=True)
    found = primaries(counts, seconds, most, "cumulative")
    allowed = seconds_of(counts, seconds) * (1 + most)
    assert seconds_of(found, seconds) <= allowed
    slowest_first = sorted(range(len(counts)), key=lambda k: -seconds[k])
    for left in product(*(range(count + 1) for count in counts)):
        ordered = [left[k] for k in slowest_first]
        whole = [counts[k] for k in slowest_first]
        partial = [i for i, n in enumerate(ordered) if n]
        if not partial or ordered[partial[0] + 1 :] != whole[partial[0] + 1 :]:
            continue  # Someone faster went before someone slower.
        if sum(left) < sum(found):
            assert seconds_of(left, seconds) > allowed


def test_all_groupings_are_counted() -> None:
    """12 GPUs have 27 of one instance, 8 of two, 1 of four; 160 have sums of fifth powers."""
    assert len(list(groupings((4, 4, 4), (1.0, 1.0, 1.0), 0.0, "cumulative"))) == 36
    seconds = [1.0] * 5
    assert len(list(groupings([32] * 5, seconds, 0.0, "cumulative"))) == 12_201
    # Without layers on the P100s: 9 + 4 + 1.
    assert len(list(groupings((4, 4, 4), PREFILL, 0.05, "cumulative"))) == 14
    assert splits_of(4) == [(1, 4), (2, 2), (4, 1)]
    assert splits_of(0) == [(0, 0)]
