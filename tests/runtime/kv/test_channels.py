"""Routes, emulated links and the watchdog, with lanes that have no pages and compile nothing."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pretended import Pretended

from jaxinfer import JaxinferError
from jaxinfer.config.cluster import LinkConfig
from jaxinfer.runtime.kv import channel as transfers
from jaxinfer.runtime.kv.channel import Channel, Landed
from jaxinfer.runtime.kv.emulated_links import EmulatedLinks
from jaxinfer.runtime.kv.stage_pair import Slab
from jaxinfer.runtime.world import RealWorld
from jaxinfer.serving.batch import Batch, Transfer
from jaxinfer.serving.world import Event, InstanceLost, TransferDone
from jaxinfer.simulate.world import SimulatedWorld, StagePair


class Lane:
    """Sends one number, wherever it is asked to, for slabs of ``token_bytes`` a token."""

    source_shard = 0

    def __init__(self, link: LinkConfig | None = None, groups: tuple[str, str] = ("g", "h")):
        self.link, self.groups, self.token_bytes = link, groups, 1000
        self.dest_sharding = jax.sharding.SingleDeviceSharding(jax.devices()[1])
        self.array: Any = jnp.zeros(1)
        self.placed: list[tuple[int, int]] = []
        self.checked: jax.Array | None = None

    def take(self, transfer: Transfer, start: int, stop: int, after: "Future[None] | None") -> Slab:
        return Slab(transfer, self, self.array, start, stop, None, after)  # type: ignore[arg-type]

    def place(self, slab: Slab, array: jax.Array) -> jax.Array | None:
        assert array.sharding == self.dest_sharding
        self.placed.append((slab.start, slab.stop))
        return self.checked

    def compare(self, slab: Slab, arrived: jax.Array) -> None:
        assert arrived is self.checked


def transfer(
    source: str, dest: str, start: int = 0, stop: int = 100, to: object = None
) -> Transfer:
    """Return a transfer to pages of its own, or to those of ``to``."""
    nothing: Any = None
    pages: Any = to or object()
    return Transfer(nothing, 0, source, dest, nothing, pages, start, stop, 0.0)


@contextmanager
def routed(
    *pairs: tuple[str, str], link: LinkConfig | None = None, watchdog_s: float = 60
) -> Iterator[tuple[RealWorld, dict[Any, Lane]]]:
    """A world of instances whose steps never end, with a lane between each of the pairs."""
    lanes = {pair: Lane(link) for pair in pairs}
    channels = {pair: Channel([lane]) for pair, lane in lanes.items()}  # type: ignore[list-item]
    workers: dict[str, Any] = {name: Pretended(None) for pair in pairs for name in pair}
    try:
        yield RealWorld(workers, [], channels, watchdog_s), lanes
    finally:
        for channel in channels.values():
            channel.close()
            assert not channel._thread.is_alive()


def until(world: RealWorld, kind: type, count: int = 1) -> list[Any]:
    """Events of one kind, from the first ones on."""
    found: list[Event] = []
    begin = time.perf_counter()
    while len(found) < count:
        assert time.perf_counter() - begin < 30
        found += [event for event in world.due_events() if isinstance(event, kind)]
    return found


def test_slabs_land_and_the_transfer_is_done() -> None:
    with routed(("a", "b")) as (world, lanes):
        world.start_transfer(moving := transfer("a", "b", 10, 600))
        (done,) = until(world, TransferDone)
    assert done.transfer is moving
    assert lanes["a", "b"].placed == [(10, 266), (266, 522), (522, 600)]
    assert done.num_bytes == 590 * 1000
    assert 0 < done.start < done.end < world.now()


@pytest.mark.parametrize("stage", [None, 0, 1])
def test_a_stage_sends_its_own_layers(stage: int | None) -> None:
    """A source of two stages, each with a lane, sends three slabs per stage."""
    lanes: list[Any] = [Lane(), Lane()]
    lanes[1].source_shard = 1
    channel, landed = Channel(lanes), list[Any]()
    moving = transfer("a", "b", 10, 600)
    assert (channel.num_slabs(moving), channel.token_bytes) == (6, 2000)
    try:
        channel.send(moving, landed.append, stage)
    finally:
        channel.close()  # Behind what has been sent.
    assert [(lanes.index(each.slab.lane), each.slab.start, each.slab.stop) for each in landed] == [
        (number, start, stop)
        for start, stop in ((10, 266), (266, 522), (522, 600))
        for number in (0, 1)
        if stage in (None, number)
    ]


# What a slab goes through, and whose it is.


class Array:
    """One that a device is still to compute."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.block_until_ready = wait


def in_gather(lane: Lane, wait: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    lane.array = Array(wait)


def in_put(lane: Lane, wait: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(device_put=lambda *args: wait())
    monkeypatch.setattr(transfers, "jax", fake)


def in_arrival(lane: Lane, wait: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(device_put=lambda *args: Array(wait))
    monkeypatch.setattr(transfers, "jax", fake)


def in_check(lane: Lane, wait: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    lane.checked = jnp.zeros(1)
    monkeypatch.setattr(lane, "compare", lambda *args: wait())


def in_taking(lane: Lane, wait: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane, "take", lambda *args: wait())


def in_placing(lane: Lane, wait: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane, "place", lambda *args: wait())


THREADS = [(in_gather, "a"), (in_put, "b"), (in_arrival, "b"), (in_check, "b")]


@pytest.mark.parametrize(("where", "whose"), [(in_taking, "a"), (in_placing, "b"), *THREADS])
def test_the_one_whose_devices_fail_is_lost(
    where: Callable[..., None], whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("injected")

    with routed(("a", "b")) as (world, lanes):
        where(lanes["a", "b"], fail, monkeypatch)
        world.start_transfer(transfer("a", "b"))
        assert until(world, InstanceLost) == [InstanceLost(whose, "RuntimeError: injected")]
        assert world.lost == {whose: "RuntimeError: injected"}
        # Nothing of it is waited for any more.
        assert world.due_events() == []


@pytest.mark.parametrize(("where", "whose"), THREADS[:3])
def test_the_one_whose_devices_hang_is_given_up(
    where: Callable[..., None], whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two transfers: the second one's data is ready, but its turn never comes."""
    ends = threading.Event()
    with routed(("a", "b"), ("a", "c"), ("c", "b"), watchdog_s=0.3) as (world, lanes):
        where(lanes["a", "b"], ends.wait, monkeypatch)
        for _ in range(2):
            world.start_transfer(transfer("a", "b"))
        assert until(world, InstanceLost) == [InstanceLost(whose, "it has not reported for 0.3 s")]
        assert world.due_events() == []
        ends.set()


def test_a_hang_is_noticed_that_begins_when_nobody_was_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends = threading.Event()
    with routed(("a", "b"), watchdog_s=0.3) as (world, lanes):
        in_gather(lanes["a", "b"], ends.wait, monkeypatch)
        world._channels["a", "b"]._queue.put(lambda: time.sleep(0.1))
        world.start_transfer(transfer("a", "b"))
        assert [event.instance for event in until(world, InstanceLost)] == ["a"]
        ends.set()


def test_a_transfer_begins_with_the_first_of_its_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first slab to begin need not be the first to land: the second one's link is faster."""
    there = jnp.zeros(1)
    monkeypatch.setattr(transfers, "jax", SimpleNamespace(device_put=lambda *args: there))
    lanes: Any = [
        Lane(LinkConfig(between=("g", "h"), gb_s=1e-3), ("g", "h")),
        Lane(LinkConfig(between=("g", "i"), gb_s=1e-2), ("g", "i")),
    ]
    for lane in lanes:
        lane.dest_sharding = there.sharding
    lanes[1].array = Array(lambda: time.sleep(0.1))
    workers: Any = {name: Pretended(None) for name in "ab"}
    channel = Channel(lanes)
    world = RealWorld(workers, [], {("a", "b"): channel})
    world.start_transfer(transfer("a", "b", 0, 200))
    (done,) = until(world, TransferDone)
    channel.close()
    assert done.end - done.start == pytest.approx(0.2, abs=1e-6)
    assert done.num_bytes == 2 * 200 * 1000


def test_a_slow_link_is_no_silence() -> None:
    slow = LinkConfig(between=("g", "h"), gb_s=1.4e-4)
    with routed(("a", "b"), link=slow, watchdog_s=0.5) as (world, _):
        world.start_transfer(transfer("a", "b"))
        (done,) = until(world, TransferDone)
    assert done.end - done.start == pytest.approx(1 / 1.4, abs=0.2)
    assert not world.lost


def test_the_failure_of_a_step_is_its_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed step loses its instance, though its transfers were to leave while it ran."""
    with routed(("a", "b")) as (world, _):

        def launch(batch: Batch, origin: float, post: object, launched: Any) -> None:
            launched(0, step := Future())
            step.set_exception(RuntimeError("injected"))

        monkeypatch.setattr(world._workers["a"], "launch", launch)
        world.launch(Batch("a", [], 0, 0, 0, transfers=[transfer("a", "b")]))
        assert until(world, InstanceLost) == [InstanceLost("a", "RuntimeError: injected")]


def test_what_is_not_as_it_was_sent_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def differ() -> None:
        raise JaxinferError("page 3 is not what was sent")

    with routed(("a", "b")) as (world, lanes):
        in_check(lanes["a", "b"], differ, monkeypatch)
        world.start_transfer(transfer("a", "b"))
        with pytest.raises(JaxinferError, match="page 3"):
            until(world, InstanceLost)


# Emulated links.

LINK = LinkConfig(between=("g", "h"), gb_s=2e-3, latency_s=0.05)  # 2,000 tokens a second.
# Each: start, source and tokens.
Sent = tuple[float, str, int]


def on_emulated_links(sent: list[Sent]) -> list[float]:
    """Return the end of each transfer's last slab; all of its slabs leave at its start."""
    lanes: dict[str, Any] = {name: Lane(LINK) for _, name, _ in sent}
    links = EmulatedLinks(lanes.values())
    moving = [transfer(name, "b", 0, tokens) for _, name, tokens in sent]
    ends = dict.fromkeys(range(len(sent)), 0.0)
    for number in sorted(ends, key=lambda number: sent[number][0]):
        start, name, tokens = sent[number]
        for first in range(0, tokens, 256):
            slab = lanes[name].take(moving[number], first, min(first + 256, tokens), None)
            links.hold_back(Landed(slab, slab.array, start, start))
    while (now := links.next_time) is not None:
        for landed in links.take_landed(now):
            assert landed.end == pytest.approx(now)
            ends[moving.index(landed.slab.transfer)] = landed.end
    return list(ends.values())


def simulated(sent: list[Sent]) -> list[float]:
    lanes = {(name, "b"): [StagePair(0, 1000, ["link"], 0.05)] for _, name, _ in sent}
    world = SimulatedWorld({}, {}, {}, lanes, {"link": 2e6}, [])
    moving = [transfer(name, "b", 0, tokens) for _, name, tokens in sent]
    ends: dict[int, float] = {}
    for start, *_ in sent:
        world.wake_at(start)
    waiting = set(range(len(sent)))
    while len(ends) < len(sent):
        for event in world.due_events():
            if isinstance(event, TransferDone):
                ends[moving.index(event.transfer)] = event.end
        for number in sorted(waiting):
            if sent[number][0] <= world.now():
                world.start_transfer(moving[number])
                waiting.remove(number)
    return [ends[number] for number in range(len(sent))]


@pytest.mark.parametrize("world", [on_emulated_links, simulated])
def test_two_routes_share_a_link(world: Callable[[list[Sent]], list[float]]) -> None:
    """1,000 tokens a second each, until the one ends; latency counts once, not by slabs."""
    found = world([(1.0, "a", 600), (1.0, "c", 200)])
    assert found == pytest.approx([1 + 0.4 + 0.05, 1 + 0.2 + 0.05])
    # The second one comes when the first one has 400 left.
    found = world([(1.0, "a", 600), (1.1, "c", 600)])
    assert found == pytest.approx([1.1 + 0.4 + 0.05, 1.1 + 0.5 + 0.05])
    # Of one channel, they share it likewise.
    found = world([(1.0, "a", 600), (1.0, "a", 200)])
    assert found == pytest.approx([1.45, 1.25])


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    st.lists(
        st.tuples(st.floats(0, 1), st.sampled_from("acd"), st.integers(1, 900)),
        min_size=1,
        max_size=8,
    )
)
def test_both_worlds_share_links_alike(sent: list[Sent]) -> None:
    assert on_emulated_links(sent) == pytest.approx(simulated(sent), abs=1e-9)


def test_a_slab_that_is_reported_late_starts_after_what_has_been_taken_off_the_link() -> None:
    """It left at 1.05, when a was on the link still, and was put by 1.1, when a had landed."""
    lanes: Any = {name: Lane(LINK) for name in "abc"}
    links = EmulatedLinks(lanes.values())

    def send(name: str, tokens: int, start: float) -> None:
        slab = lanes[name].take(transfer(name, "x"), 0, tokens, None)
        links.hold_back(Landed(slab, slab.array, start, start))

    send("a", 100, 1.0)
    send("c", 250, 1.0)
    assert links.take_landed(1.1) == []
    send("b", 100, 1.05)
    # From 1.1 on, a thousand a second each: 100 of b, and c has 50 more.
    ends = {landed.slab.transfer.source: landed.end for landed in links.take_landed(2.0)}
    assert ends == pytest.approx({"a": 1.15, "b": 1.25, "c": 1.275})


def test_slabs_of_one_request_land_in_the_order_in_which_they_have_left() -> None:
    """The shorter ones share the link and would be there first; pages of 8 bits mind that.

    Another request's do not wait.
    """
    lane: Any = Lane(LINK)
    links, pages = EmulatedLinks([lane]), object()
    for start, (first, stop), to in (
        (1.0, (0, 250), pages),
        (1.05, (250, 270), pages),
        (1.05, (0, 20), None),
        (1.05, (270, 280), pages),
    ):
        moving = transfer("a", "b", first, stop, to)
        slab = lane.take(moving, first, stop, None)
        links.hold_back(Landed(slab, slab.array, start, start))
    landed = []
    while (now := links.next_time) is not None:
        landed += links.take_landed(now)
    # Four share 2,000 tokens a second: 10 each by 1.07, three 10 more by 1.085, then one alone.
    assert [(each.slab.start, each.slab.stop, each.end) for each in landed] == [
        (0, 20, pytest.approx(1.135)),
        (0, 250, pytest.approx(1.2)),
        (250, 270, pytest.approx(1.2)),
        (270, 280, pytest.approx(1.2)),
    ]


def test_slabs_of_other_layers_of_one_request_do_not_wait() -> None:
    """They go to other pages, by a link that is ten times as fast."""
    slow, fast = (
        LinkConfig(between=("g", "h"), gb_s=1e-3),
        LinkConfig(between=("g", "i"), gb_s=1e-2),
    )
    lanes: list[Any] = [Lane(slow), Lane(fast, ("g", "i"))]
    links, moving = EmulatedLinks(lanes), transfer("a", "b")
    for lane in lanes:
        slab = lane.take(moving, 0, 200, None)
        links.hold_back(Landed(slab, slab.array, 1.0, 1.0))
    landed = []
    while (now := links.next_time) is not None:
        landed += links.take_landed(now)
    assert [(each.slab.lane, each.end) for each in landed] == [
        (lanes[1], pytest.approx(1.02)),
        (lanes[0], pytest.approx(1.2)),
    ]


def test_each_way_over_a_link_has_its_rate() -> None:
    there, back = Lane(LINK), Lane(LINK, ("h", "g"))
    other = Lane(LinkConfig(between=("h", "i"), gb_s=1e-3), ("h", "i"))
    lanes: list[Any] = [there, back, other]
    links = EmulatedLinks(lanes)
    for lane in lanes:
        slab = lane.take(transfer("a", "b"), 0, 200, None)
        links.hold_back(Landed(slab, slab.array, 1.0, 1.0))
    assert links.take_landed(1.1499) == []
    assert [landed.end for landed in links.take_landed(1.3)] == pytest.approx([1.15, 1.15, 1.2])


def test_a_slab_that_the_machine_moves_slower_lands_when_it_has() -> None:
    lane: Any = Lane(LINK)
    links = EmulatedLinks([lane])
    slab = lane.take(transfer("a", "b"), 0, 200, None)
    links.hold_back(Landed(slab, slab.array, 1.0, 7.0))
    assert [landed.end for landed in links.take_landed(7.0)] == [7.0]


def test_concurrent_transfers_of_a_run_take_the_links_time() -> None:
    """600 tokens over two channels, at 2,000 a second; the machine itself takes no time."""
    with routed(("a", "b"), ("c", "b"), link=LINK) as (world, _):
        world.start_transfer(transfer("a", "b", 0, 400))
        world.start_transfer(transfer("c", "b", 0, 200))
        done = until(world, TransferDone, 2)
    start, end = min(event.start for event in done), max(event.end for event in done)
    assert end - start >= 0.3 + 0.05 - 1e-9
    for event in done:
        assert event.end <= world.now()
