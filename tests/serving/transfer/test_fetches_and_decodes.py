"""Decodes of a full pool and what others fetch: decodes wait for no fetch that has not begun."""

from collections.abc import Collection
from dataclasses import replace

from fake_world import Timing
from hypothesis import example, given
from hypothesis import strategies as st
from properties import examples
from scenarios import Follow, Script
from serving_checks import Outcome, Run, make_kv, new_instance

from jaxinfer.serving.batch import Batch
from jaxinfer.serving.instance import Instance, InstanceOptions
from jaxinfer.serving.policies import Policies
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.system import Assignment
from jaxinfer.serving.views import ClusterView, Leg, RequestView

OPTIONS = InstanceOptions(max_num_batched_tokens=64, watermark=0)


def follow(requests: list[RequestState], legs: dict[str, tuple[Leg, ...]]) -> dict[str, Script]:
    return {
        r.id: Script(r.prompt_len, r.max_tokens, r.arrival, None, legs.get(r.id, (Leg("D"),)), 2)
        for r in requests
    }


class Fetches(Follow):
    """Follows the scripts; r2 fetches from D."""

    def route(self, waiting: Collection[RequestView], cluster: ClusterView) -> list[Assignment]:
        found = super().route(waiting, cluster)
        for assignment in found:
            assignment.fetch_from = "D" if assignment.request == "r2" else None
        return found


def serve_beside_a_fetch(pages: int) -> Outcome:
    """At D, r1 decodes from 50 s on. From 55 s on, r2 is to fetch r0's prompt from D to P.

    It waits at P until the prompt of r3 is computed, for 12 s. It holds three pages at D.
    """
    a = list(range(12))
    requests = [
        RequestState("r0", 12, 1, 0.0, a),
        RequestState("r1", 12, 20, 50.0, list(range(100, 112))),
        RequestState("r2", 13, 1, 55.0, [*a, 7]),
        RequestState("r3", 24, 1, 54.0, list(range(200, 224))),
    ]
    instances = [
        new_instance("D", make_kv(pages, 4, caching=True), OPTIONS),
        new_instance(
            "P",
            make_kv(20, 4, caching=True),
            replace(OPTIONS, max_num_seqs=1, max_num_batched_tokens=2),
        ),
    ]
    scripts = follow(requests, {"r2": (Leg("P"),), "r3": (Leg("P"),)})
    return Run(Fetches(scripts), instances, requests).verify()


def test_a_decode_takes_the_pages_that_another_request_waits_to_fetch() -> None:
    """In a pool of eight pages, r1 takes back those that r2 waits for, and loses no step."""
    roomy, full = serve_beside_a_fetch(20), serve_beside_a_fetch(8)
    for outcome in (roomy, full):
        assert outcome.finished["r1"].metrics.token_times == [51.0 + step for step in range(20)]
    assert roomy.transfers_of("r2") == [("D", "P", 0, 12)]
    assert full.transfers_of("r2") == []
    cached = [o.finished["r2"].metrics.num_cached_tokens for o in (roomy, full)]
    assert cached == [12, 0]
    assert (roomy.route_of("r2"), full.route_of("r2")) == ([("P", 1)], [("P", 13)])


class NotesWaits(Instance):
    """Notes decodes that get no page, and not because a step or copy still reads free ones."""

    waits: list[str]

    def next_batch(self) -> Batch | None:
        may_launch = self.in_flight < self.options.max_in_flight
        batch = super().next_batch()
        added = {row.request.id for row in batch.rows} if batch else set()
        is_full = may_launch and not self.kv.num_free and not self.kv.num_pinned
        for request in self.running.values() if is_full and self.importing else ():
            assert request.hold
            if request.id not in added and request.leg_goal > request.hold.capacity:
                self.waits.append(request.id)
        return batch


def serve_with_a_tier(seconds: int, pages: int, work: list[tuple[int, int, int]]) -> list[str]:
    """Return the decodes that waited. A tier keeps r0; of the others, some begin as r0 does.

    Args:
        seconds: time of each fetch.
        work: arrivals, outputs, and how many tokens each has in common with r0.
    """
    a = list(range(24))
    requests = [RequestState("r0", 24, 1, 0.0, a)]
    requests[0].session = "s"
    for number, (arrival, output, common) in enumerate(work, 1):
        own = range(1000 * number, 1000 * number + 26 - common)
        requests.append(
            RequestState(f"r{number}", 26, output, 100.0 + arrival, [*a[:common], *own])
        )
    options = replace(OPTIONS, tier="T", tier_takes="sessions", max_num_batched_tokens=256)
    there = NotesWaits("D", make_kv(pages, 8, caching=True), options, Policies())
    there.waits = []
    instances = [
        there,
        new_instance("T", make_kv(30, 8, caching=True), replace(OPTIONS, computes=False)),
    ]
    timing = Timing(max_transfer=1, transfers={"D": seconds})
    Run(Follow(follow(requests, {})), instances, requests, timing).verify()
    return there.waits


WORK = st.lists(
    st.tuples(st.integers(0, 25), st.integers(1, 30), st.sampled_from((0, 8, 24))),
    min_size=2,
    max_size=5,
)


@examples(60)
@example(6, 14, [(4, 19, 0), (17, 20, 24), (9, 24, 0), (4, 24, 0)])
@example(6, 13, [(17, 15, 24), (11, 23, 0), (5, 18, 0), (15, 25, 8)])
@given(st.integers(1, 7), st.integers(7, 24), WORK)
def test_decodes_wait_for_no_fetch(
    seconds: int, pages: int, work: list[tuple[int, int, int]]
) -> None:
    """A page of eight tokens for each decode suffices if a fetch takes less than eight steps."""
    assert serve_with_a_tier(seconds, pages, work) == []
