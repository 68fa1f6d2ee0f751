"""Pools and holds: every page is free, held or pinned, and in one table at a time."""

from collections.abc import Sequence

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from scenarios import examples
from serving_checks import make_kv, pages_of

from jaxinfer.serving.page_pool import Hold, KVShards, PagePool, Shard


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
    ("source", "dest", "slices"), [(0, 0, (1,)), (0, 2, (1,)), (1, 0, (1,)), (-1, 0, (0,))]
)
def test_slices_that_cannot_move(source: int, dest: int, slices: tuple[int, ...]) -> None:
    hold = make_kv(4, 4, [(0, 1), (2,)]).reserve(4)
    assert hold
    assert not hold.can_move(source, dest, slices)
    assert hold.can_move(0, 1, (0, 1))


class Pools(RuleBasedStateMachine):
    """Any order of reserving, growing, pinning, releasing and moving slices."""

    def __init__(self) -> None:
        super().__init__()
        layout = ((13, (0, 1)), (7, (2,)), (5, ()))
        self.kv = KVShards([Shard(PagePool(pages, 3), slices) for pages, slices in layout])
        self.holds: list[Hold] = []
        self.pinned: list[Hold] = []

    def pick(self, holds: Sequence[Hold], number: int) -> Hold | None:
        return holds[number % len(holds)] if holds else None

    @rule(tokens=st.integers(1, 20))
    def reserve(self, tokens: int) -> None:
        if hold := self.kv.reserve(tokens):
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
    def move(self, number: int, ends: list[int], piece: int) -> None:
        hold = self.pick(self.holds, number)
        if hold and not hold.users and hold.can_move(ends[0], ends[1], (piece,)):
            assert hold.copy_slices(ends[0], ends[1], (piece,)) == (piece in hold.tables[ends[1]])
            if piece in hold.tables[ends[1]]:
                hold.drop_slices(ends[0], (piece,))

    @invariant()
    def every_page_is_in_one_place(self) -> None:
        waiting = {h for h in self.pinned if h.released}
        for number, shard in enumerate(self.kv.shards):
            held = [p for h in self.holds for p in pages_of(h, number)]
            pinned = [p for h in waiting for p in pages_of(h, number)]
            pool = shard.pool
            assert pool.num_pinned == len(pinned)
            assert sorted([*pool._free, *held, *pinned]) == list(range(1, pool.num_usable + 1))
        for hold in self.holds:
            tables = [pages for table in hold.tables for pages in table.values()]
            assert len(tables) == 3
            assert all(len(pages) == hold.num_pages for pages in tables)


TestPools = Pools.TestCase
TestPools.settings = examples(60)
