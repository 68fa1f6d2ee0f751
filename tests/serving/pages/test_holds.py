"""Holds: pages of a request over several shards, and slices that move."""

import pytest
from serving_checks import make_kv

from jaxinfer.serving.kv_shards import KVShards
from jaxinfer.serving.page_pool import PagePool, Shard
from jaxinfer.serving.prefix_cache import CachedPage


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_pages_for_tokens(tokens: int, pages: int) -> None:
    assert make_kv(9, 4).pages_for(tokens) == pages


@pytest.mark.parametrize(("pools", "fits"), [((6, 3), True), ((5, 3), False), ((6, 2), False)])
def test_each_slice_needs_its_pages(pools: tuple[int, int], fits: bool) -> None:
    """Two slices of three pages here, and one of three there."""
    first, second = pools
    kv = KVShards([Shard(PagePool(first + 1, 4), (0, 1)), Shard(PagePool(second + 1, 4), (2,))])
    assert (kv.reserve(12) is not None) == fits


def test_growth_needs_room_for_each_slice() -> None:
    kv = KVShards([Shard(PagePool(6, 4), (0, 1))])
    hold = kv.reserve(8)
    assert hold
    assert kv.shards[0].pool.num_free == 1
    assert not hold.grow(9)
    assert (hold.num_pages, kv.shards[0].pool.num_free) == (2, 1)


def test_slices_move_where_there_is_room_for_all_of_them() -> None:
    kv = KVShards([Shard(PagePool(9, 4), (0, 1)), Shard(PagePool(6, 4), ())])
    freed = []
    kv.on_free = lambda: freed.append([shard.pool.num_free for shard in kv.shards])
    hold = kv.reserve(9)
    assert hold
    assert not hold.copy_slices([(0, 1, (0, 1))])  # Six pages, of which there are five.
    assert hold.tables == [{0: [1, 2, 3], 1: [4, 5, 6]}, {}]
    assert hold.copy_slices([(0, 1, (1,))])
    assert hold.tables == [{0: [1, 2, 3], 1: [4, 5, 6]}, {}]
    assert hold.copies == [{}, {1: [1, 2, 3]}]
    assert freed == []
    hold.take_copies([(0, 1, (1,))])
    assert (hold.tables, freed) == ([{0: [1, 2, 3]}, {1: [1, 2, 3]}], [[5, 2]])


def test_slices_on_their_way_grow_in_both_places() -> None:
    kv = KVShards([Shard(PagePool(9, 4), (0, 1)), Shard(PagePool(5, 4), ())])
    hold = kv.reserve(9)
    assert hold
    assert hold.copy_slices([(0, 1, (1,))])
    assert (hold.lacking(13), hold.lacking(17)) == ([], [0, 1])
    assert hold.grow(13)
    assert hold.tables == [{0: [1, 2, 3, 7], 1: [4, 5, 6, 8]}, {}]
    assert hold.copies == [{}, {1: [1, 2, 3, 4]}]
    assert not hold.grow(17)
    hold.drop_copies()
    assert [shard.num_free_pages for shard in kv.shards] == [0, 4]
    assert [shard.num_pairs for shard in kv.shards] == [2, 0]


def test_slices_on_their_way_come_free_with_the_rest() -> None:
    kv = KVShards([Shard(PagePool(9, 4), (0, 1)), Shard(PagePool(5, 4), ())])
    hold = kv.reserve(9)
    assert hold
    assert hold.copy_slices([(0, 1, (1,))])
    hold.pin()
    hold.release()
    hold.drop_copies()  # Too late: who uses them still does.
    assert [shard.pool.num_pinned for shard in kv.shards] == [6, 3]
    hold.unpin()
    assert [shard.pool.num_pinned for shard in kv.shards] == [0, 0]
    assert [shard.num_free_pages for shard in kv.shards] == [8, 4]
    assert [shard.num_pairs for shard in kv.shards] == [0, 0]


def test_slices_may_take_all_that_is_free() -> None:
    kv = KVShards([Shard(PagePool(7, 4), (0, 1)), Shard(PagePool(7, 4), ())])
    hold = kv.reserve(9)
    assert hold
    assert hold.copy_slices([(0, 1, (0, 1))])
    assert [shard.pool.num_free for shard in kv.shards] == [0, 0]


def test_the_latest_reservation_is_given_back() -> None:
    kv = make_kv(9, 4)
    assert not kv.take_back_reserved()
    one, two, three = (kv.reserve(4) for _ in range(3))
    assert one
    assert two
    assert three
    kv.reserved = {one: one.release, two: two.release}
    assert kv.take_back_reserved()
    assert [hold.released for hold in (one, two, three)] == [False, True, False]
    assert list(kv.reserved) == [one]


def test_a_hold_that_begins_with_cached_pages() -> None:
    """Cached pages count as taken where nobody has them; they are nobody's to free."""
    kv = make_kv(9, 4, [(0, 1), (2,)], caching=True)
    first = kv.reserve(12)
    assert first
    assert kv.cache
    first.keep([b"0", b"1"])
    assert first.num_hashed == 2
    pages = kv.cache.match([b"0", b"1", b"2"])
    assert len(pages) == 2
    assert (kv.pages_to_take(17, pages), kv.pages_to_take(17)) == (3, 5)
    second = kv.reserve(17, pages)
    assert second
    assert (second.num_pages, second.num_hashed, second.capacity) == (5, 2, 20)
    assert [table[piece][:2] for table in second.tables for piece in table] == [
        table[piece][:2] for table in first.tables for piece in table
    ]
    assert kv.num_free == 3
    first.release()
    assert kv.num_free == 4  # Of its three pages, two are the second one's, too.
    second.release()
    assert (kv.num_free, [len(shard.pool._free) for shard in kv.shards]) == (9, [14, 7])
    assert [shard.pool.num_idle for shard in kv.shards] == [4, 2]
    # All idle: they have to be taken.
    assert kv.pages_to_take(17, pages) == 5
    assert [page.holds for page in pages] == [0, 0]
    assert kv.reserve(40, pages) is None
    assert [page.holds for page in pages] == [0, 0]


def test_who_waits_hears_of_cached_pages_that_come_free() -> None:
    kv = make_kv(4, 4, caching=True)
    freed = []
    kv.on_free = lambda: freed.append(kv.num_free)
    hold = kv.reserve(12)
    assert hold
    hold.keep([b"0", b"1", b"2"])
    assert (kv.num_free, freed) == (1, [])
    hold.release()
    assert freed == [4]


def test_the_last_pages_become_idle_first() -> None:
    """Later pages would not be found without those before them."""
    kv = make_kv(4, 4, caching=True)
    hold = kv.reserve(12)
    assert hold
    assert kv.cache
    hold.keep([b"0", b"1", b"2"])
    hold.release()
    assert [page.digest for page in kv.cache._idle] == [b"2", b"1", b"0"]
    other = kv.reserve(8)
    assert other
    assert isinstance(kv.cache.match([b"0"])[0], CachedPage)
    assert len(kv.cache.match([b"0", b"1", b"2"])) == 2


def test_slices_go_where_they_belong_or_where_there_is_room() -> None:
    kv = make_kv(3, 4, [((0, 1), ()), ((2, 3), (), ())])
    first, second = kv.reserve(8), kv.reserve(8)
    assert first
    assert second
    assert [sorted(table) for table in first.tables] == [[0, 1], [], [2, 3], [], []]
    assert [sorted(table) for table in second.tables] == [[0], [1], [2], [3], []]
    assert [shard.num_pairs for shard in kv.shards] == [3, 1, 3, 1, 0]
    assert kv.num_free == 0  # Stage 0 has a page on its second shard only.
    assert kv.reserve(1) is None
    assert first.lacking(9) == [0, 2]
    assert second.lacking(9) == [0, 2]
    assert second.lacking(17) == [0, 1, 2, 3]
    assert second.lacking(8) == []


def test_slices_are_placed_as_the_system_says() -> None:
    kv = make_kv(3, 4, [((0, 1), ()), ((2, 3), (), ())])
    placement = [[], [1, 0], [3], [], [2]]
    assert kv.is_placement(placement)
    assert kv.reserve(8, placement=placement) is None  # Three pages, of which it takes four.
    hold = kv.reserve(4, placement=placement)
    assert hold
    assert [sorted(table) for table in hold.tables] == [[], [0, 1], [3], [], [2]]
    for wrong in (placement[:4], [[0], [0, 1], [3], [], [2]], [[2], [0, 1], [3], [], []]):
        assert not kv.is_placement(wrong)
    assert not kv.is_placement([[], [1], [3], [], [2]])


def test_moves_have_room_for_all_or_change_nothing() -> None:
    kv = make_kv(3, 4, [((0, 1), ()), ((2, 3), (), ())])
    hold = kv.reserve(8)
    assert hold
    before = hold.tables
    assert hold.can_move([(0, 1, (0,)), (2, 3, (2,)), (2, 4, (3,))])
    assert not hold.can_move([(2, 3, (2,)), (2, 4, (2,))])  # A slice in two directions.
    assert not hold.can_move([(0, 3, (0,))])  # Another stage.
    assert not hold.copy_slices([(2, 3, (2,)), (0, 1, (0, 1))])
    assert hold.tables == before
    assert [shard.num_free_pages for shard in kv.shards] == [2, 3, 2, 3, 3]
    moves = [(0, 1, (0,)), (2, 3, (2,)), (2, 4, (3,))]
    assert hold.copy_slices(moves)
    assert [shard.num_pairs for shard in kv.shards] == [2, 1, 2, 1, 1]
    hold.take_copies(moves)
    assert [sorted(table) for table in hold.tables] == [[1], [0], [], [2], [3]]
    assert [shard.num_free_pages for shard in kv.shards] == [4, 1, 6, 1, 1]
    assert [shard.num_pairs for shard in kv.shards] == [1, 1, 0, 1, 1]
