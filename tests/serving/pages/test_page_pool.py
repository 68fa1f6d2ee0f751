"""Pools: every page is free, held or pinned, and in one table at a time."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from properties import examples
from serving_checks import make_kv, pages_of

from jaxinfer.serving.features.head_slices import SliceMove, most_pages
from jaxinfer.serving.kv_shards import HeldPages, KVShards
from jaxinfer.serving.page_pool import CountedPages, PagePool, Shard


def test_pool_hands_out_lowest_pages_and_never_page_0() -> None:
    pool = PagePool(5, 16)
    assert pool.take(3) == [1, 2, 3]
    pool.give([2])
    pool.give([1])
    assert pool.num_free == 3
    assert pool.take(3) == [1, 2, 4]


@pytest.mark.parametrize(("num_pages", "page_size"), [(1, 4), (0, 4), (4, 0)])
def test_pool_that_holds_nothing(num_pages: int, page_size: int) -> None:
    with pytest.raises(ValueError, match="holds nothing"):
        PagePool(num_pages, page_size)


def test_shards_share_one_page_size() -> None:
    with pytest.raises(ValueError, match="one page size"):
        KVShards([Shard(PagePool(4, 8)), Shard(PagePool(4, 16))])


def test_a_hold_has_room_in_all_shards_or_changes_nothing() -> None:
    kv = KVShards([Shard(PagePool(9, 4), (0, 1)), Shard(PagePool(4, 4), (2,))])
    assert (kv.num_pages, kv.num_free) == (3, 3)
    hold = kv.reserve(5)
    assert hold
    assert hold.tables == [{0: [1, 2], 1: [3, 4]}, {2: [1, 2]}]
    assert hold.capacity == 8
    assert not hold.grow(17)
    assert kv.reserve(5) is None
    assert (hold.num_pages, kv.num_free, kv.num_in_use) == (2, 1, 6)
    assert hold.grow(8)
    assert hold.num_pages == 2
    assert hold.grow(9)
    assert hold.capacity == 12


def test_pinned_pages_come_free_with_the_last_user() -> None:
    kv = make_kv(4, 4)
    freed = []
    kv.on_free = lambda: freed.append(kv.num_free)
    hold = kv.reserve(8)
    assert hold
    hold.pin()
    hold.pin()
    hold.release()
    assert (kv.num_free, kv.num_pinned) == (2, 2)
    hold.unpin()
    assert (kv.num_pinned, freed) == (2, [])
    hold.unpin()
    assert (kv.num_free, kv.num_pinned, freed) == (4, 0, [4])
    with pytest.raises(AssertionError, match="released twice"):
        hold.release()


@pytest.mark.parametrize(
    ("source", "dest", "slices"),
    [
        (0, 0, (1,)),
        (0, 2, (1,)),
        (0, -1, (1,)),
        (1, 0, (1,)),
        (-1, 0, (2,)),
        (2, 0, (1,)),
        (0, 1, (0, 2)),
    ],
)
def test_slices_that_cannot_move(source: int, dest: int, slices: tuple[int, ...]) -> None:
    hold = make_kv(4, 4, [(0, 1), (2,)]).reserve(4)
    assert hold
    assert not hold.can_move([(source, dest, slices)])
    assert hold.can_move([(0, 1, (0, 1))])


def test_more_than_is_free_cannot_be_taken() -> None:
    pool = PagePool(3, 4)
    assert pool.take(2) == [1, 2]
    assert pool.num_free == 0
    with pytest.raises(RuntimeError, match="more pages taken than are free"):
        pool.take(1)


def test_the_smallest_pool_holds_one_page() -> None:
    assert PagePool(2, 1).take(1) == [1]


def test_pages_that_are_only_counted() -> None:
    pool = CountedPages(6, 4)
    assert (pool.num_usable, pool.num_free, pool.num_pinned) == (5, 5, 0)
    assert pool.take(3) == [0, 0, 0]
    assert pool.num_free == 2
    pool.give([0, 0])
    assert pool.num_free == 4
    assert not pool._free  # No list of a large pool's pages.


@pytest.mark.parametrize("kind", [PagePool, CountedPages])
def test_a_pool_that_is_closed_has_no_page_any_more(kind: type[PagePool]) -> None:
    pool = kind(6, 4)
    pool.take(3)
    assert (pool.num_usable, pool.num_free) == (5, 2)
    pool.close()
    assert (pool.num_usable, pool.num_free) == (0, 0)
    pool.clear()
    assert (pool.num_usable, pool.num_free) == (0, 0)


def test_numbers_over_all_shards() -> None:
    """The smallest decides what fits; pages pinned and in use are added up."""
    shards = [
        Shard(PagePool(8, 4), (0, 1)),
        Shard(PagePool(5, 4), (2,)),
        Shard(PagePool(3, 4), ()),
    ]
    kv = KVShards(shards)
    assert (kv.page_size, kv.num_pages, kv.num_free, kv.num_in_use) == (4, 3, 3, 0)
    assert (kv.cache, kv.reserved) == (None, {})
    hold = kv.reserve(9)
    assert hold
    assert (hold.num_pages, hold.num_hashed, hold.users) == (3, 0, 0)
    assert (kv.num_free, kv.num_in_use) == (1, 9)  # The empty shard has room, too.
    hold.pin()
    hold.release()
    assert (kv.num_pinned, kv.num_in_use) == (9, 9)
    assert [shard.pool.num_pinned for shard in shards] == [6, 3, 0]
    hold.unpin()
    assert (kv.num_pinned, kv.num_in_use) == (0, 0)


POOLS = st.lists(st.tuples(st.integers(2, 9), st.integers(0, 3)), min_size=1, max_size=3)


@examples(300)
@given(
    st.lists(POOLS.filter(lambda stage: any(count for _, count in stage)), max_size=2, min_size=1)
)
def test_the_largest_request_with_room(stages: list[list[tuple[int, int]]]) -> None:
    """The size is the best of all ways to place the slices, stage by stage."""

    def most(stage: list[tuple[int, int]]) -> int:
        pools = [pages - 1 for pages, _ in stage]
        num_slices = sum(count for _, count in stage)
        ways = itertools.product(range(len(pools)), repeat=num_slices)
        counts = [[way.count(number) for number in range(len(pools))] for way in ways]
        return max(
            min(free // count for free, count in zip(pools, way, strict=True) if count)
            for way in counts
        )

    numbers = itertools.count()
    shards = [
        Shard(PagePool(pages, 1), tuple(next(numbers) for _ in range(count)), stage)
        for stage, of_stage in enumerate(stages)
        for pages, count in of_stage
    ]
    kv = KVShards(shards)
    assert kv.num_pages == kv.num_free == min(most(stage) for stage in stages)
    assert kv.reserve(kv.num_free + 1) is None
    assert kv.num_free == 0 or kv.reserve(kv.num_free)


@examples(100)
@given(st.lists(st.tuples(st.integers(2, 60), st.integers(1, 4)), min_size=1, max_size=4))
def test_with_one_shard_for_each_stage_the_smallest_decides(pools: list[tuple[int, int]]) -> None:
    kv = KVShards(
        [Shard(PagePool(n, 2), tuple(range(count)), i) for i, (n, count) in enumerate(pools)]
    )
    assert not kv.is_spread
    assert kv.num_pages == kv.num_free == min((n - 1) // count for n, count in pools)
    spread = [most_pages([n - 1], count) for n, count in pools]
    assert kv.num_free == min(spread)


class Pools(RuleBasedStateMachine):
    """A state machine that reserves, grows, pins, releases and moves slices in any order."""

    def __init__(self) -> None:
        super().__init__()
        layout = ((13, (0, 1)), (7, (2,)), (5, ()))
        self.kv = KVShards([Shard(PagePool(pages, 3), slices) for pages, slices in layout])
        self.holds: list[HeldPages] = []
        self.pinned: list[HeldPages] = []
        self.moves: dict[HeldPages, SliceMove] = {}

    def pick(self, holds: Sequence[HeldPages], number: int) -> HeldPages | None:
        return holds[number % len(holds)] if holds else None

    @rule(tokens=st.integers(1, 20))
    def reserve(self, tokens: int) -> None:
        fits = self.kv.pages_for(tokens) <= self.kv.num_free
        hold = self.kv.reserve(tokens)
        assert (hold is not None) == fits
        if hold:
            assert hold.capacity >= tokens
            self.holds.append(hold)

    @rule(number=st.integers(0, 9), tokens=st.integers(1, 20))
    def grow(self, number: int, tokens: int) -> None:
        if hold := self.pick(self.holds, number):
            before = hold.num_pages
            assert hold.grow(tokens) == (hold.capacity >= tokens)
            assert hold.num_pages in (before, self.kv.pages_for(tokens))

    @rule(number=st.integers(0, 9))
    def pin(self, number: int) -> None:
        if hold := self.pick(self.holds, number):
            hold.pin()
            self.pinned.append(hold)

    @rule(number=st.integers(0, 9))
    def unpin(self, number: int) -> None:
        if hold := self.pick(self.pinned, number):
            hold.unpin()
            self.pinned.remove(hold)

    @rule(number=st.integers(0, 9))
    def release(self, number: int) -> None:
        if hold := self.pick(self.holds, number):
            self.holds.remove(hold)
            hold.release()

    @rule(number=st.integers(0, 9), ends=st.permutations(range(3)), piece=st.integers(0, 2))
    def begin_to_move(self, number: int, ends: list[int], piece: int) -> None:
        hold = self.pick(self.holds, number)
        move = (ends[0], ends[1], (piece,))
        if hold and not hold.copies and hold.can_move([move]):
            assert hold.copy_slices([move]) == bool(hold.copies)
            if hold.copies:
                self.moves[hold] = move

    @rule(number=st.integers(0, 9), arrives=st.booleans())
    def end_a_move(self, number: int, arrives: bool) -> None:
        hold = self.pick([h for h in self.holds if h.copies], number)
        if hold and arrives and not hold.users:
            hold.take_copies([self.moves[hold]])
        elif hold:
            hold.drop_copies()

    @invariant()
    def every_page_is_in_one_place(self) -> None:
        waiting = {h for h in self.pinned if h.released}
        for number, shard in enumerate(self.kv.shards):
            held = [p for h in self.holds for p in pages_of(h, number)]
            pinned = [p for h in waiting for p in pages_of(h, number)]
            pool = shard.pool
            assert pool.num_pinned == len(pinned)
            assert shard.num_pairs == sum(
                len(table)
                for h in [*self.holds, *waiting]
                for table in [h.tables[number], *h.copies[number : number + 1]]
            )
            assert sorted([*pool._free, *held, *pinned]) == list(range(1, pool.num_usable + 1))
        for hold in self.holds:
            tables = [pages for table in hold.tables for pages in table.values()]
            copies = [pages for table in hold.copies for pages in table.values()]
            assert len(tables) == 3
            assert len(copies) <= 1
            assert all(len(pages) == hold.num_pages for pages in [*tables, *copies])


TestPools = Pools.TestCase


TestPools.settings = examples(60)


@pytest.mark.parametrize("kind", [PagePool, CountedPages])
def test_a_closed_pool_that_is_opened_again_is_as_at_the_start(kind: type[PagePool]) -> None:
    pool = kind(10, 4)
    pool.take(3)
    pool.num_pinned = 2
    pool.close()
    assert (pool.is_closed, pool.num_free, pool.num_usable) == (True, 0, 0)
    pool.open()
    assert (pool.is_closed, pool.num_free, pool.num_usable, pool.num_pinned) == (False, 9, 9, 0)
    assert len(pool.take(9)) == 9
