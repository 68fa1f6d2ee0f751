"""Prefix caching: what is found, what is evicted, and what it saves."""

import pytest
from scenarios import Follow, Script
from serving_checks import Outcome, Run, make_kv, make_requests, new_instance

from jaxinfer.serving.instance_options import InstanceOptions
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.views import Leg

PAGE = 4


def serve(
    requests: list[RequestState], num_pages: int = 50, max_num_seqs: int = 8, caching: bool = True
) -> Outcome:
    options = InstanceOptions(max_num_seqs=max_num_seqs, max_num_batched_tokens=16, watermark=0)
    instance = new_instance("A", make_kv(num_pages, PAGE, caching=caching), options)
    scripts = {
        r.id: Script(r.prompt_len, r.max_tokens, r.arrival, None, (Leg("A"),), 1) for r in requests
    }
    return Run(Follow(scripts), [instance], requests).verify()


def hits(outcome: Outcome) -> list[int | None]:
    return [r.metrics.num_cached_tokens for _, r in sorted(outcome.finished.items())]


def request(name: str, tokens: list[int], max_tokens: int = 1, arrival: float = 0) -> RequestState:
    return RequestState(name, len(tokens), max_tokens, arrival, tokens)


@pytest.mark.parametrize(
    ("shared", "found"), [(0, 0), (3, 0), (4, 4), (7, 4), (8, 8), (11, 8), (12, 8)]
)
def test_full_pages_are_found_but_never_the_last_token(shared: int, found: int) -> None:
    """Twelve tokens lie in pages of four; the twelfth has to be computed to go on from it."""
    requests = make_requests([(12, 3)] * 2, [0, 40], [shared, shared])
    outcome = serve(requests)
    assert hits(outcome) == [0, found]
    assert outcome.route_of("r1") == [("A", 14 - found)]


def test_a_page_is_found_only_once_its_entries_exist() -> None:
    outcome = serve(make_requests([(12, 3)] * 3, [0, 0, 40], [12] * 3))
    assert hits(outcome) == [0, 0, 8]


def test_outputs_are_kept_too() -> None:
    first = request("r0", list(range(6)), 8)
    outcome = serve([first])
    turn = [*range(6), *outcome.finished["r0"].output_token_ids, 77]
    outcome = serve([request("r0", list(range(6)), 8), request("r1", turn, 2, 60)])
    # 13 entries of the first request exist: its last token has none.
    assert hits(outcome) == [0, 12]


def test_the_least_recently_used_page_is_evicted_and_the_end_of_a_prompt_first() -> None:
    a, b = list(range(12)), list(range(100, 112))
    outcome = serve(
        [
            request("r0", a),
            request("r1", b, arrival=20),
            request("r2", a, arrival=40),
            # Six of eight pages hold a and b; three more evict the last page of b, used before a.
            request("r3", list(range(200, 212)), arrival=60),
            request("r4", a, arrival=80),
            request("r5", b, arrival=100),
        ],
        num_pages=8,
    )
    assert hits(outcome) == [0, 0, 8, 0, 8, 8]


def test_preempted_requests_find_their_own_pages() -> None:
    lengths = [(8, 20)] * 2
    with_cache, without = (
        serve(make_requests(lengths, shared=[0, 0]), num_pages=9, caching=caching)
        for caching in (True, False)
    )
    assert sum(r.metrics.num_preemptions for r in with_cache.finished.values()) > 0

    def computed(outcome: Outcome) -> int:
        return sum(batch.work.tokens for batch in outcome.world.batches)

    assert computed(with_cache) < computed(without)


def test_requests_that_share_pages_fit_where_they_otherwise_would_not() -> None:
    """Five pages of the same beginning and one of their own each, in a pool of ten."""
    requests = make_requests([(22, 2)] * 5, [0, 30, 30, 30, 30], [20] * 5)
    together = max(b.num_running for b in serve(requests, num_pages=10).world.batches)
    apart = make_requests([(22, 2)] * 5, [0, 30, 30, 30, 30], [0] * 5)
    assert together == 4
    assert max(b.num_running for b in serve(apart, num_pages=10).world.batches) == 1


def test_pages_by_themselves() -> None:
    kv = make_kv(4, PAGE, [(0, 1), (2,)], caching=True)
    cache, pools = kv.cache, [shard.pool for shard in kv.shards]
    assert cache
    hold = kv.reserve(12)
    assert hold
    digests = [b"a", b"b", b"c"]
    hold.keep(digests[:1])
    hold.keep(digests)
    hold.keep(digests[:2])  # Known already.
    assert hold.num_hashed == 3
    assert [page.pages for page in hold.cached.values()] == [
        [{0: i, 1: i + 3}, {2: i}] for i in (1, 2, 3)
    ]
    assert cache.match(digests) == list(hold.cached.values())
    assert cache.match([b"a", b"x", b"c"]) == [hold.cached[0]]
    assert cache.match([b"x", b"b"]) == []
    (page,) = cache.match([b"b"])
    assert page.holds == 1
    cache.acquire(page)
    assert (page.holds, [pool.num_idle for pool in pools]) == (2, [0, 0])
    hold.release()
    assert (page.holds, [pool.num_idle for pool in pools]) == (1, [4, 2])
    cache.drop(page)
    assert [pool.num_idle for pool in pools] == [6, 3]
    cache.acquire(page)
    assert [pool.num_idle for pool in pools] == [4, 2]
    # The third page is the longest idle, since the last ones are dropped first.
    cache.evict()
    assert [pool.num_idle for pool in pools] == [2, 1]
    assert [sorted(pool._free) for pool in pools] == [[3, 6, 7, 8], [3, 4]]
    assert (cache.match([b"c"]), len(cache.match([b"a"])), len(cache.match([b"b"]))) == ([], 1, 1)


def test_forgotten_pages_are_free_once_no_request_has_them() -> None:
    kv = make_kv(9, PAGE, caching=True)
    first, second = kv.reserve(12), kv.reserve(4)
    assert kv.cache
    assert first
    assert second
    first.keep([b"a", b"b", b"c"])
    second.keep([b"d"])
    second.release()
    kv.cache.forget([b"b", b"d", b"unknown"])
    assert (kv.num_free, kv.shards[0].pool.num_idle) == (6, 0)
    assert [page.digest for page in kv.cache.match([b"a", b"b", b"c"])] == [b"a"]
    again = kv.reserve(8)
    assert again
    again.keep([b"d", b"b"])  # Others take their place.
    first.release()
    assert (kv.num_free, kv.shards[0].pool.num_idle) == (7, 2)
    again.release()
    assert (kv.num_free, kv.shards[0].pool.num_idle) == (9, 4)
    assert [page.pages for page in kv.cache.match([b"d", b"b"])] == [
        page.pages for page in again.cached.values()
    ]
    pages = [kv.reserve(4) for _ in range(9)]  # Each page of the pool is there, and once.
    assert len({hold.tables[0][0][0] for hold in pages if hold}) == 9


def test_pages_known_already_stay_those_of_the_first() -> None:
    kv = make_kv(9, PAGE, caching=True)
    first, second = kv.reserve(8), kv.reserve(8)
    assert kv.cache
    assert first
    assert second
    first.keep([b"a"])
    second.keep([b"a", b"b"])
    assert (list(first.cached), list(second.cached), second.num_hashed) == ([0], [1], 2)
    assert kv.cache.match([b"a"]) == [first.cached[0]]
    first.release()
    kv.cache.evict()
    second.keep([b"a", b"b"])  # Each is offered once.
    assert (list(second.cached), kv.cache.match([b"a"])) == ([1], [])
    second.release()
    assert (kv.num_free, len(kv.shards[0].pool._free)) == (9, 8)


def test_a_pool_takes_from_the_free_pages_before_it_evicts() -> None:
    kv = make_kv(3, PAGE, caching=True)
    hold = kv.reserve(8)
    assert kv.cache
    assert hold
    hold.keep([b"a", b"b"])
    hold.release()
    other = kv.reserve(4)
    assert other
    assert (other.tables, len(kv.cache.match([b"a", b"b"]))) == ([{0: [3]}], 2)
    assert kv.reserve(4)
    assert len(kv.cache.match([b"a", b"b"])) == 1


def test_digests_depend_on_all_tokens_before() -> None:
    one, other = request("r0", [1, 2, 3, 4, 5, 6]), request("r1", [9, 2, 3, 4, 5, 6])
    digests = one.page_digests(2, 3)
    assert len({*digests, *other.page_digests(2, 3)}) == 6
    assert request("r2", [1, 2, 3, 4]).page_digests(2, 2) == digests[:2]
    assert one.page_digests(2, 1) == digests[:1]
    assert one.page_digests(2, 3) == digests


def test_digests_of_two_page_sizes_and_of_outputs() -> None:
    found = request("r0", [1, 2, 3], 9)
    found.output_token_ids = [4, 5, 6, 7, 8]
    prompt = request("r1", [1, 2, 3, 4, 5, 6, 7, 8])
    for size, count in ((2, 2), (2, 4), (4, 2), (4, 1)):
        assert found.page_digests(size, count) == prompt.page_digests(size, count)
        assert len(found.page_digests(size, count)) == count
    # A page of the same tokens after others is another one.
    again = request("r2", [1, 2, 1, 2]).page_digests(2, 2)
    assert again[0] != again[1]
