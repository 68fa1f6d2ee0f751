"""Channels whose sides answer late, fail, or are lost: what is dropped, and who is blamed."""

from types import SimpleNamespace
from typing import Any

import pytest

from jaxinfer import JaxinferError
from jaxinfer.runtime.cluster import Cluster
from jaxinfer.runtime.kv.channel import Channel, Landed
from jaxinfer.runtime.kv.kv_messages import (
    Drop,
    Offer,
    Offered,
    OpenEnd,
    Place,
    Pull,
    Pulled,
    SlabFailed,
)
from jaxinfer.runtime.kv.outcome import Failed, ProcessLost
from jaxinfer.runtime.processes.restart_groups import Restarted, RestartResult
from jaxinfer.runtime.world import RealWorld
from jaxinfer.serving.batch import Transfer
from jaxinfer.serving.world import InstanceBack, InstanceLost, TransferDone


class FakeSide:
    """Notes what it is to do."""

    def __init__(self) -> None:
        self.waits_for: Any = {}
        self.done: list[Any] = []
        self.lost: str | None = None
        self.hear: Any = None

    def open(self, message: OpenEnd, hear: Any) -> None:
        self.hear = hear

    def do(self, message: Any) -> None:
        if self.lost:
            raise ProcessLost(self.lost)
        self.done.append(message)

    def on_loss(self, hear: Any) -> None:
        self.lose = hear

    def why_lost(self, seconds: float) -> str | None:
        return self.lost

    def kinds(self) -> list[type]:
        return [type(message) for message in self.done]


@pytest.fixture
def channel() -> tuple[Channel, FakeSide, FakeSide]:
    source, dest = FakeSide(), FakeSide()
    pair: Any = SimpleNamespace(
        form=SimpleNamespace(),
        source_shard=0,
        dest_shard=0,
        source_end=0,
        dest_end=1,
        token_bytes=1,
        link=None,
    )
    return Channel(("a", "b"), (source, dest), [pair], False, ["host"]), source, dest


def transfer() -> Any:
    hold = SimpleNamespace(tables=[{0: [1, 2, 3]}])
    return SimpleNamespace(start=0, stop=9, source="a", dest="b", source_hold=hold, dest_hold=hold)


def a_transfer() -> Transfer:
    request, hold = None, SimpleNamespace(tables=[{0: [1, 2, 3]}])
    return Transfer(request, 0, "a", "b", hold, hold, 0, 9, 0.0)  # type: ignore[arg-type]


def test_a_slab_whose_source_has_gone_is_not_kept(channel: Any) -> None:
    channel, source, _ = channel
    source.lost = "ended"
    with pytest.raises(ProcessLost, match="ended"):
        channel.send(transfer(), [].append)
    assert not channel._slabs


def test_slabs_of_a_run_that_was_broken_off(channel: Any) -> None:
    """The next one forgets them, on both sides; what comes of them late is nobody's failure."""
    channel, source, dest = channel
    old: list[Any] = []
    new: list[Any] = []
    for _ in range(2):
        channel.send(transfer(), old.append)
    first, second = (offer.slab for offer in source.done)
    channel._hear(Offered(0, first, "there", None))
    channel._hear(Pulled(1, first, 0.0, 1.0))
    assert [type(landed) for landed in old] == [Landed]
    channel.send(transfer(), new.append)
    assert source.kinds() == [Offer, Offer, Drop, Drop, Offer]
    assert dest.kinds() == [Pull, Drop, Drop]
    assert len(channel._slabs) == 1
    channel._hear(Offered(0, second, "there", None))
    channel._hear(Pulled(1, second, 0.0, 1.0))
    assert dest.done[3:] == [Drop(1, second, "host")]
    channel._hear(SlabFailed(1, first, True, "not offered"))
    assert (len(old), new) == (1, [])


def test_all_slabs_are_dropped_when_their_destination_is_lost(channel: Any) -> None:
    """Also those that it has pulled; when the source is lost, these are still to be placed."""
    channel, source, dest = channel
    posted: list[Any] = []
    for _ in range(3):
        channel.send(transfer(), posted.append)
    first, second, third = (offer.slab for offer in source.done)
    for slab in (first, second):
        channel._hear(Offered(0, slab, "there", None))
    channel._hear(Pulled(1, first, 0.0, 1.0))
    source.lose("ended")
    assert list(channel._slabs) == [first]
    assert dest.done[2:] == [Drop(1, slab, "host") for slab in (second, third)]
    dest.lose("ended, too")
    assert not channel._slabs
    assert source.done[-1] == Drop(0, first, "host")
    assert dest.done[-1] == Drop(1, first, "host")
    assert [p.instance for p in posted if isinstance(p, Failed)] == ["a", "b"]


def test_a_slab_that_is_pulled_while_its_source_is_being_lost_is_dropped(channel: Any) -> None:
    """The slab was given up together with the one before it, whose offer is being taken back."""
    channel, source, dest = channel
    posted: list[Any] = []
    for _ in range(2):
        channel.send(transfer(), posted.append)
    first, second = (offer.slab for offer in source.done)
    do = source.do

    def hear_meanwhile(message: Any) -> None:
        if message == Drop(0, first, "host"):
            channel._hear(Pulled(1, second, 0.0, 1.0))
        do(message)

    source.do = hear_meanwhile
    source.lose("ended")
    assert [type(p) for p in posted] == [Failed]
    assert Drop(1, second, "host") in dest.done


def test_an_offer_to_who_was_lost_is_no_failure_of_who_came_in_its_place(channel: Any) -> None:
    """The source's thread finds nobody there, and says so when the loop has a new process in use.

    What has been sent to the new one by then is kept.
    """
    channel, source, dest = channel
    heard: list[Any] = []
    outcome = RestartResult("g", ["b"], "killed", 1.0)
    restarts: Any = SimpleNamespace(
        listen=heard.append,
        expect=lambda *args: True,
        take=lambda group: outcome,
        goes_without=lambda name: ((), False),
    )
    workers: Any = dict.fromkeys("ab")
    world = RealWorld(workers, [], {("a", "b"): channel}, restarts=restarts)
    dest.lose("killed")  # Of no run as yet: this one hears of it by ``restarts``.
    world.start_transfer(a_transfer())
    do, again = dest.do, a_transfer()

    def find_nobody(message: Any) -> None:
        dest.do = do
        heard[0](Failed("b", ProcessLost("killed")))
        heard[0](Restarted("g"))
        assert world.due_events() == [
            InstanceLost("b", "ProcessLost: killed", returns=True),
            InstanceBack("b"),
        ]
        world.start_transfer(again)
        raise ProcessLost("killed")

    dest.do = find_nobody
    first = source.done[0].slab
    channel._hear(Offered(0, first, "there", None))
    assert [slab.transfer for slab in channel._slabs.values()] == [again]
    second = source.done[1].slab
    channel._hear(Offered(0, second, "there", None))
    channel._hear(Pulled(1, second, 0.0, 1.0))
    (landed,) = world.due_events()
    assert isinstance(landed, TransferDone)
    assert landed.transfer is again
    assert (world.lost, world.is_idle) == ({}, True)


def test_who_finds_nobody_there_tells_of_the_loss(channel: Any) -> None:
    """The run may have begun after the process has told of its end. A source is blamed likewise."""
    channel, source, dest = channel
    workers: Any = dict.fromkeys("abc")
    world = RealWorld(workers, [], {("a", "b"): channel})
    world.start_transfer(a_transfer())
    dest.lost = "killed"
    channel._hear(Offered(0, source.done[0].slab, "there", None))
    assert world.due_events() == [InstanceLost("b", "ProcessLost: killed")]
    world = RealWorld(workers, [], {("a", "b"): channel})
    for _ in range(2):
        world.start_transfer(a_transfer())
    _, first, second = (each.slab for each in source.done if isinstance(each, Offer))
    channel._hear(SlabFailed(0, first, True, "broken"))
    assert world.due_events() == [InstanceLost("a", "broken")]
    channel._hear(SlabFailed(0, second, True, "broken"))
    del world.lost["a"]  # As if it were back.
    assert world.due_events() == []


def test_what_fails_to_be_placed_is_the_destinations_failure(channel: Any) -> None:
    channel, source, dest = channel
    posted: list[Any] = []
    channel.send(transfer(), posted.append)
    number = source.done[0].slab
    channel._hear(Offered(0, number, "there", None))
    channel._hear(Pulled(1, number, 0.0, 1.0))
    channel.place(posted.pop())
    assert dest.kinds() == [Pull, Place]
    assert not channel._slabs
    channel._hear(SlabFailed(1, number, False, "no room"))
    assert [(p.instance, str(p.error)) for p in posted] == [("b", "no room")]


def test_a_slab_that_breaks_off_with_its_source_names_the_signal(channel: Any) -> None:
    channel, source, _ = channel
    posted: list[Any] = []
    channel.send(transfer(), posted.append)
    source.lost = "process of group a was ended by signal 9"
    channel._hear(SlabFailed(1, source.done[0].slab, True, "EOFError: "))
    assert [(p.instance, str(p.error)) for p in posted] == [("a", source.lost)]
    assert not channel._slabs


def test_a_source_that_is_lost_before_the_probe_is_a_mistake_of_the_load(channel: Any) -> None:
    channel, source, _ = channel
    source.lost = "ended"
    with pytest.raises(JaxinferError, match="a -> b: ended"):
        channel.probe("a -> b")
    assert not channel._probing


@pytest.mark.parametrize(
    ("rates", "by", "failed"),
    [
        ({"host": 2.0, "transfer_server": 3.0}, "transfer_server", {}),
        ({"host": 3.0, "transfer_server": 2.0}, "host", {}),
        ({"host": 2.0}, "host", {"transfer_server": "a -> b: changed"}),
        ({"transfer_server": 2.0}, "transfer_server", {"host": "a -> b: changed"}),
    ],
)
def test_the_quickest_transport_is_taken_and_what_fails_is_told(
    channel: Any, monkeypatch: pytest.MonkeyPatch, rates: Any, by: str, failed: Any
) -> None:
    channel, *_ = channel
    channel._transports = ["host", "transfer_server"]

    def probe(pair: Any, names: str) -> float:
        if channel.transport not in rates:
            raise JaxinferError(f"{names}: changed")
        return rates[channel.transport]

    monkeypatch.setattr(channel, "_probe", probe)
    assert channel.probe("a -> b") == rates[by]
    assert (channel.transport, channel.failed) == (by, failed)
    cluster = Cluster(None, {}, {("a", "b"): channel}, {})  # type: ignore[arg-type]
    told = "".join(f"; not {name}: {why}" for name, why in failed.items())
    assert cluster.transports == {"a -> b": by + told}
    rates.clear()
    with pytest.raises(JaxinferError, match="a -> b: changed; a -> b: changed"):
        channel.probe("a -> b")
