"""Routes and the watchdog, with slabs of no pages; nothing is compiled."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from channel_cases import LINK, Pages, between, transfer
from pretended import Pretended
from waiting import HANG_S, wait_until

from jaxinfer import JaxinferError
from jaxinfer.config.cluster import LinkConfig
from jaxinfer.runtime.kv import kv_endpoint
from jaxinfer.runtime.kv.channel import Channel
from jaxinfer.runtime.kv.kv_endpoint import ThisProcess
from jaxinfer.runtime.processes.process_group import RemoteEndpoint
from jaxinfer.runtime.world import RealWorld
from jaxinfer.serving.batch import Batch
from jaxinfer.serving.world import Event, InstanceLost, TransferDone


@pytest.fixture(autouse=True)
def no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SlabSource", "SlabDest"):
        monkeypatch.setattr(kv_endpoint, name, lambda stage, form, verify: form)


def here(*pairs: tuple[str, str]) -> ThisProcess:
    """Two stages of each instance: a source's are on one device, a destination's on another."""
    found: dict[str, Any] = {}
    for number, names in enumerate(zip(*pairs, strict=True)):
        found |= {name: [SimpleNamespace(plan=number)] * 2 for name in names}
    return ThisProcess(found)


@contextmanager
def routed(
    *names: tuple[str, str],
    link: LinkConfig | None = None,
    watchdog_s: float = 60,
    verify: bool = False,
) -> Iterator[tuple[RealWorld, dict[Any, Any]]]:
    """A world of instances whose steps never end, and the pages between each two of them."""
    side = here(*names)
    channels = {
        ends: Channel(ends, (side, side), [between(link)], verify, ["device"]) for ends in names
    }
    workers: dict[str, Any] = {name: Pretended(None) for ends in names for name in ends}
    try:
        pages = {ends: channel.pairs[0].form for ends, channel in channels.items()}
        yield RealWorld(workers, [], channels, watchdog_s), pages
    finally:
        side.close()
        assert not any(end.thread.is_alive() for end in side.endpoint._ends.values())


def until(world: RealWorld, kind: type, count: int = 1) -> list[Any]:
    """Events of one kind, from the first ones on."""
    found: list[Event] = []
    begin = time.perf_counter()
    while len(found) < count:
        assert time.perf_counter() - begin < HANG_S
        found += [event for event in world.due_events() if isinstance(event, kind)]
    return found


def test_slabs_land_and_the_transfer_is_done() -> None:
    with routed(("a", "b")) as (world, pages):
        world.start_transfer(moving := transfer("a", "b", 10, 600))
        (done,) = until(world, TransferDone)
    assert done.transfer is moving
    assert pages["a", "b"].placed == [(10, 266), (266, 522), (522, 600)]
    assert done.num_bytes == 590 * 1000
    assert 0 < done.start < done.end < world.now()


@pytest.mark.parametrize("stage", [None, 0, 1])
def test_a_stage_sends_its_own_layers(stage: int | None) -> None:
    """A source of two stages, each with a pair, sends three slabs per stage."""
    pairs = [between(shard=number) for number in range(2)]
    side, landed = here(("a", "b")), list[Any]()
    channel = Channel(("a", "b"), (side, side), pairs, False, ["device"])
    moving = transfer("a", "b", 10, 600)
    assert (channel.num_slabs(moving), channel.token_bytes) == (6, 2000)
    try:
        channel.send(moving, landed.append, stage)
    finally:
        side.close()  # Behind what has been sent.
    for number, pair in enumerate(pairs):
        found = [(each.slab.start, each.slab.stop) for each in landed if each.slab.pair is pair]
        wanted = [(10, 266), (266, 522), (522, 600)]
        assert found == (wanted if stage in (None, number) else [])


def test_the_probe_finds_copies_that_lose_data(monkeypatch: pytest.MonkeyPatch) -> None:
    side = here(("a", "b"))
    channel = Channel(("a", "b"), (side, side), [between(), between()], False, ["device"])
    assert channel.probe("a -> b") > 0
    put = jax.device_put

    def losing(x: Any, sharding: Any) -> jax.Array:
        return put(0 * x if isinstance(x, jax.Array) else x, sharding)

    monkeypatch.setattr(kv_endpoint, "jax", SimpleNamespace(device_put=losing))
    message = "^a -> b: a known array arrives changed; peer-to-peer copies .*NCCL_P2P_DISABLE=1"
    with pytest.raises(JaxinferError, match=message):
        channel.probe("a -> b")
    side.close()


# What a slab goes through, and whose it is.


class Array:
    """An array that a device is still to compute."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.block_until_ready = wait

    def __array__(self, *args: Any, **options: Any) -> Any:
        return self.block_until_ready()


def in_gather(pages: Pages, wait: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    pages.array = Array(wait)


def in_put(pages: Pages, wait: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(device_put=lambda *args: wait())
    monkeypatch.setattr(kv_endpoint, "jax", fake)


def in_arrival(pages: Pages, wait: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(device_put=lambda *args: Array(wait))
    monkeypatch.setattr(kv_endpoint, "jax", fake)


def in_check(pages: Pages, wait: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    pages.checked = Array(wait)


def in_taking(pages: Pages, wait: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "take", lambda *args: wait())


def in_placing(pages: Pages, wait: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "place", lambda *args: wait())


THREADS = [(in_gather, "a"), (in_put, "b"), (in_arrival, "b"), (in_check, "b")]


@pytest.mark.parametrize(("where", "whose"), [(in_taking, "a"), (in_placing, "b"), *THREADS])
def test_the_one_whose_devices_fail_is_lost(
    where: Callable[..., None], whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("injected")

    with routed(("a", "b"), verify=where is in_check) as (world, pages):
        where(pages["a", "b"], fail, monkeypatch)
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
    with routed(("a", "b"), ("a", "c"), ("c", "b")) as (world, pages):
        where(pages["a", "b"], ends.wait, monkeypatch)
        for _ in range(2):
            world.start_transfer(transfer("a", "b"))
        side, _ = world._channels["a", "b"].sides
        wait_until(lambda: [who for who, _ in [*side.waits_for.values()]] == [whose])
        world._watchdog_s = 0.3
        assert until(world, InstanceLost) == [InstanceLost(whose, "it has not reported for 0.3 s")]
        assert world.due_events() == []
        ends.set()


def test_a_hang_is_noticed_that_begins_when_nobody_was_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends = threading.Event()
    with routed(("a", "b"), watchdog_s=0.3) as (world, pages):
        in_gather(pages["a", "b"], ends.wait, monkeypatch)
        channel = world._channels["a", "b"]
        endpoint = channel.sides[0].endpoint  # type: ignore[attr-defined]
        endpoint._ends[channel.pairs[0].source_end].jobs.put(lambda: time.sleep(0.1))
        world.start_transfer(transfer("a", "b"))
        assert [event.instance for event in until(world, InstanceLost)] == ["a"]
        ends.set()


def test_a_hang_here_is_noticed_when_kv_goes_to_another_process() -> None:
    ends = threading.Event()
    process: Any = SimpleNamespace(
        on_loss=[], ends={}, ask=lambda message: iter("."), send=lambda message: None
    )
    side, pair = here(("a", "b")), between()
    pair.form.array = Array(ends.wait)  # type: ignore[attr-defined]
    channel = Channel(("a", "b"), (side, RemoteEndpoint(process)), [pair], False, ["host"])
    workers: Any = {name: Pretended(None) for name in "ab"}
    world = RealWorld(workers, [], {("a", "b"): channel}, watchdog_s=0.3)
    world.start_transfer(transfer("a", "b"))
    assert until(world, InstanceLost) == [InstanceLost("a", "it has not reported for 0.3 s")]
    ends.set()
    side.close()


def test_a_transfer_begins_with_the_first_of_its_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first slab to begin need not be the first to land: the second one's link is faster."""
    there = SimpleNamespace(block_until_ready=lambda: jnp.zeros(1, device=jax.devices()[1]))
    fake = SimpleNamespace(device_put=lambda *args: there)
    monkeypatch.setattr(kv_endpoint, "jax", fake)
    pairs: list[Any] = [
        between(LinkConfig(between=("g", "h"), gb_s=1e-3), ("g", "h")),
        between(LinkConfig(between=("g", "i"), gb_s=1e-2), ("g", "i"), 1),
    ]
    pairs[1].form.array = Array(lambda: time.sleep(0.1))  # Begins a while after the other one.
    workers: Any = {name: Pretended(None) for name in "ab"}
    side = here(("a", "b"))
    channel = Channel(("a", "b"), (side, side), pairs, False, ["device"])
    world = RealWorld(workers, [], {("a", "b"): channel})
    world.start_transfer(transfer("a", "b", 0, 200))
    (done,) = until(world, TransferDone)
    side.close()
    assert done.end - done.start >= 0.2 - 1e-6
    assert done.num_bytes == 2 * 200 * 1000


def test_a_slow_link_is_no_silence() -> None:
    slow = LinkConfig(between=("g", "h"), gb_s=1.4e-4)
    with routed(("a", "b"), link=slow) as (world, _):
        world.start_transfer(transfer("a", "b"))
        wait_until(lambda: not world._posted.empty())
        world._watchdog_s = 0.5
        (done,) = until(world, TransferDone)
    assert done.end - done.start >= 1 / 1.4 - 1e-6
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


def test_what_is_not_as_it_was_sent_ends_the_run() -> None:
    with routed(("a", "b"), verify=True) as (world, pages):
        pages["a", "b"].sent = np.zeros((1, 256))
        pages["a", "b"].checked = np.arange(256)[None] == 20
        world.start_transfer(transfer("a", "b"))
        with pytest.raises(JaxinferError, match=r"layer 0, page 4 of b \(token 20\) is not what"):
            until(world, InstanceLost)


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
