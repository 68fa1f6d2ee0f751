"""Orders of eviction: by the next use, against all choices and Belady's bound; pinned sessions."""

import random
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples
from scenarios import Chaos, Follow, Scenario, Script, scenarios
from serving_checks import Outcome, Run, make_kv, make_requests, new_instance

from jaxinfer.caches.eviction import ByNextUse, Eviction, PinnedLast, later_uses
from jaxinfer.caches.later_uses import LaterUses
from jaxinfer.serving.instance import Instance
from jaxinfer.serving.instance_options import InstanceOptions
from jaxinfer.serving.kv_shards import HeldPages
from jaxinfer.serving.prefix_cache import CachedPage, PrefixCache
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.views import Leg
from scripts.validate.next_use import belady, chains
from scripts.validate.prefix_cache import drawn, spared

NEVER = (-float("inf"), 0)


def most_hits(accesses: Sequence[int], capacity: int) -> int:
    """The most hits by trying all that may be kept after each access."""

    @lru_cache(None)
    def after(index: int, kept: frozenset[int]) -> int:
        if index == len(accesses):
            return 0
        there = kept | {accesses[index]}
        hit = accesses[index] in kept
        if len(there) <= capacity:
            return hit + after(index + 1, there)
        return hit + max(after(index + 1, there - {gone}) for gone in there)

    return after(0, frozenset())


@examples(60)
@given(st.lists(st.integers(0, 5), max_size=14), st.integers(1, 4))
def test_the_bound_is_the_best_of_all_choices(accesses: list[int], capacity: int) -> None:
    cut = len(accesses) // 2
    assert belady([accesses[:cut], accesses[cut:]], capacity) == most_hits(accesses, capacity)


def test_hits_by_next_use_are_near_the_bound() -> None:
    """Turns of conversations, all known; prompts of up to 14 blocks, which are held together.

    The bound holds no block for a prompt as a whole. Where a prompt takes most of the pool, it is
    out of reach.
    """
    work = drawn()
    for pool, least in ((16, 0.93), (30, 0.97), (40, 0.99)):
        bound = belady(chains(work), pool)
        by_use, by_age = (
            sum(spared(work, pool, order=order)) // 512 for order in ("next_use", "lru")
        )
        assert least * bound <= by_use <= bound
        assert by_age < 0.9 * bound


def page(number: int) -> CachedPage:
    return CachedPage(number.to_bytes(2, "big"), [])


@examples(100)
@given(st.integers(0, 2**16), st.integers(1, 400))
def test_the_page_whose_use_is_farthest_goes_first(seed: int, actions: int) -> None:
    """Whatever comes, goes, and is needed sooner than was known; equal ones go in their order."""
    rng, uses = random.Random(seed), dict[bytes, tuple[float, int]]()
    idle, known = ByNextUse(lambda digest: uses.get(digest, NEVER)), list[CachedPage]()
    for number in range(actions):
        match rng.choice(("add", "add", "sooner", "take", "evict")):
            case "add":
                known.append(page(number))
                uses[known[-1].digest] = rng.choice([NEVER, (-float(rng.randint(0, 9)), 0)])
                idle[known[-1]] = None
            case "sooner" if known:
                digest = rng.choice(known).digest
                uses[digest] = min(0.0, uses[digest][0] + rng.randint(0, 3)), 0
            case "take" if known:
                del idle[known.pop(rng.randrange(len(known)))]
            case "evict" if known:
                gone, _ = idle.popitem(last=False)
                assert uses[gone.digest] == min(uses[each.digest] for each in known)
                known.remove(gone)
    assert list(idle) == known


def test_pages_with_one_use_go_in_the_order_in_which_they_came() -> None:
    idle = ByNextUse(lambda digest: (-5.0, 0))
    pages = [page(number) for number in range(300)]
    for each in pages:
        idle[each] = None
    assert [idle.popitem()[0] for _ in pages] == pages


def test_a_page_that_was_in_use_again_is_idle_since_then() -> None:
    """A page of two prompts is idle again after the others of the second: its end goes first."""
    idle = ByNextUse(lambda digest: (-5.0, 0))
    shared, end = page(0), page(1)
    idle[shared] = None
    del idle[shared]
    idle[end] = idle[shared] = None
    assert [idle.popitem()[0] for _ in range(2)] == [end, shared]
    assert not idle._numbers


def test_uses_are_of_requests_that_still_come_to_an_instance() -> None:
    requests = make_requests([(9, 2), (9, 2), (5, 2)], [3.0, 1.0, 2.0], [4, 4, 4])
    uses = LaterUses([4])
    uses.begin(requests)
    assert uses.known == ["r0", "r1", "r2"]
    shared, own = requests[0].page_digests(4, 2)

    def when(digest: bytes, instance: str = "A") -> float:
        return -uses.next_use(digest, 4, instance)[0]

    # Of the first: 9 tokens, the last of which no cache spares.
    assert (when(shared), when(own), when(requests[1].page_digests(4, 2)[1])) == (1, 3, 1)
    requests[1].legs = [Leg("B"), Leg("C")]
    assert (when(shared), when(shared, "B"), when(shared, "C")) == (2, 1, 1)
    requests[1].hold = make_kv(9, 4).reserve(9)
    assert (when(shared, "B"), when(shared, "C")) == (2, 1)
    uses.ended(requests[1])
    assert (when(shared), when(shared, "C")) == (2, 2)
    uses.ended(requests[2])
    uses.ended(requests[0])
    assert uses._uses == {4: {}}
    assert uses.next_use(shared, 4, "A") == NEVER


def test_uses_of_a_tier_are_those_of_the_instances_that_fetch_from_it() -> None:
    """A request that waits at A needs its pages in the tier until it is admitted."""
    (request,) = make_requests([(9, 2)], [3.0], [4])
    engines = [
        ("A", Eviction(tier="T"), 4),
        ("B", Eviction(), 4),
        ("T", Eviction(order="next_use"), 4),
    ]
    uses = later_uses(engines)
    assert uses
    uses.begin([request])
    (digest,) = request.page_digests(4, 1)
    assert uses.next_use(digest, 4, "T") == (-3, 0)
    request.legs = [Leg("A")]
    assert uses.next_use(digest, 4, "T") == (-3, 0)
    request.hold = make_kv(9, 4).reserve(9)
    assert uses.next_use(digest, 4, "T") == NEVER
    request.legs, request.hold = [Leg("B")], None
    assert uses.next_use(digest, 4, "T") == NEVER


def test_pinned_pages_go_last_and_the_oldest_session_is_unpinned() -> None:
    idle = PinnedLast(5, OrderedDict())
    shared, a, b, other = (page(number) for number in range(4))
    idle.pin("a", [a, shared])
    idle.pin("b", [b, shared])
    for each in (a, b, shared, other):
        idle[each] = None
    assert (list(idle), len(idle)) == ([other, a, b, shared], 4)
    # Three pages more are seven: those of the session whose turn is longest ago are unpinned.
    c = [page(number) for number in range(10, 13)]
    idle.pin("c", c)
    assert list(idle) == [other, a, b, shared]
    assert [idle.popitem()[0] for _ in range(3)] == [other, a, b]
    for each in c:
        idle[each] = None
    # A later turn takes the place of the one before.
    idle.pin("c", [*c, page(13)])
    idle.pin("b", [])
    assert [idle.popitem()[0] for _ in range(4)] == [shared, *c]
    assert not len(idle)


def test_more_than_the_limit_is_not_pinned() -> None:
    idle = PinnedLast(2, OrderedDict())
    pages = [page(number) for number in range(3)]
    idle.pin("a", pages)
    idle[pages[0]] = idle[page(9)] = None
    assert idle.popitem()[0] is pages[0]


def hits(limit: int, num_pages: int = 8) -> list[int | None]:
    """Return the cached tokens of a turn after three unrelated prompts, which fill the pool."""
    first, second = list(range(12)), [*range(12), *range(50, 54)]
    others = [list(range(start, start + 12)) for start in (100, 200, 300)]
    requests = [
        RequestState(f"r{number}", len(tokens), 1, 20.0 * number, tokens)
        for number, tokens in enumerate([first, *others, second])
    ]
    requests[0].session = requests[-1].session = "s"
    options = InstanceOptions(max_num_batched_tokens=16, watermark=0)
    instance = new_instance("A", make_kv(num_pages, 4, caching=True), options)
    if limit:
        kv = instance.kv
        kv.cache = PrefixCache(kv.shards, idle=PinnedLast(limit, OrderedDict()))
    scripts = {r.id: Script(r.prompt_len, 1, r.arrival, None, (Leg("A"),), 1) for r in requests}
    outcome: Outcome = Run(Follow(scripts), [instance], requests).verify()
    return [r.metrics.num_cached_tokens for _, r in sorted(outcome.finished.items())]


def test_a_pinned_session_is_there_for_its_next_turn() -> None:
    assert hits(limit=0) == [0] * 5
    assert hits(limit=3) == [0, 0, 0, 0, 12]
    assert hits(limit=2) == [0] * 5
    # It gives way where there is no other page: of four, the others need three.
    assert hits(limit=3, num_pages=4) == [0, 0, 0, 0, 4]


class InOwnOrder(Instance):
    """Evicts by digests, in place of next uses, or pins requests of three sessions."""

    def __init__(self, name: str, kv: Any, *more: Any) -> None:
        super().__init__(name, kv, *more)
        if kv.cache:
            by_digest = ByNextUse(lambda digest: (-float(digest[0]), 0))
            idle = by_digest if name == "A" else PinnedLast(4, by_digest)
            kv.cache = PrefixCache(kv.shards, idle=idle)

    def reserve(self, request: RequestState, *more: Any, **options: Any) -> HeldPages | None:
        request.session = str(int(request.id[1:]) % 3)
        return super().reserve(request, *more, **options)


@examples(100)
@given(scenarios(max_instances=2), st.integers(0, 2**16), st.integers(0, 20))
def test_runs_are_right_whatever_is_evicted(scenario: Scenario, seed: int, actions: int) -> None:
    scenario.caching = True
    chaos = Chaos(scenario.by_id, seed, actions, caching=True)
    outcome = scenario.run(chaos, instance_type=InOwnOrder).verify()
    assert not any(request.error for request in outcome.finished.values())


@pytest.mark.parametrize("order", ["lru", "next_use"])
def test_the_cache_off(order: str) -> None:
    from jaxinfer.config.engine import EngineOptions
    from jaxinfer.errors import JaxinferError

    EngineOptions.model_validate({"eviction": {"order": order, "pin_pages": 3}})
    with pytest.raises(JaxinferError, match=r"^eviction: is for enable_prefix_caching: true"):
        EngineOptions.model_validate(
            {"eviction": {"order": order, "pin_pages": 3}, "enable_prefix_caching": False}
        )
