"""Emulated links hold slabs back for as long as a simulation's flows take."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from channel_cases import LINK, Hold, between, transfer
from hypothesis import given
from hypothesis import strategies as st
from modelled_world import modelled_world
from properties import examples

from jaxinfer.config.cluster import LinkConfig
from jaxinfer.runtime.kv.channel import Landed
from jaxinfer.runtime.kv.emulated_links import EmulatedLinks
from jaxinfer.runtime.kv.stage_pair import Slab, StagePair
from jaxinfer.serving.batch import Transfer
from jaxinfer.serving.world import TransferDone
from jaxinfer.simulate.stage_path import StagePath


def landed(moving: Transfer, pair: StagePair, part: tuple[int, int], start: float) -> Landed:
    """Return a slab of a transfer, which the machine moves in no time."""
    return Landed(Slab(0, moving, pair, *part), start, start)


# Each: start, source and tokens.
Sent = tuple[float, str, int]


def on_emulated_links(sent: list[Sent]) -> list[float]:
    """Return the end of each transfer's last slab; all of its slabs leave at its start."""
    pairs = {name: between(LINK) for _, name, _ in sent}
    links = EmulatedLinks(pairs.values())
    moving = [transfer(name, "b", 0, tokens) for _, name, tokens in sent]
    ends = dict.fromkeys(range(len(sent)), 0.0)
    for number in sorted(ends, key=lambda number: sent[number][0]):
        start, name, tokens = sent[number]
        for first in range(0, tokens, 256):
            part = first, min(first + 256, tokens)
            links.hold_back(landed(moving[number], pairs[name], part, start))
    while (now := links.next_time) is not None:
        for each in links.take_landed(now):
            assert each.end == pytest.approx(now)
            ends[moving.index(each.slab.transfer)] = each.end
    return list(ends.values())


def simulated(sent: list[Sent]) -> list[float]:
    lanes = {(name, "b"): [StagePath(0, 1000, ["link"], 0.05)] for _, name, _ in sent}
    world = modelled_world({}, {}, {}, lanes, {"link": 2e6}, [])
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


@examples(60)
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
    """The slab left at 1.05, when a was on the link still, and was put by 1.1: a had landed."""
    pairs = {name: between(LINK) for name in "abc"}
    links = EmulatedLinks(pairs.values())

    def send(name: str, tokens: int, start: float) -> None:
        links.hold_back(landed(transfer(name, "x"), pairs[name], (0, tokens), start))

    send("a", 100, 1.0)
    send("c", 250, 1.0)
    assert links.take_landed(1.1) == []
    send("b", 100, 1.05)
    # From 1.1 on, a thousand a second each: 100 of b, and c has 50 more.
    ends = {each.slab.transfer.source: each.end for each in links.take_landed(2.0)}
    assert ends == pytest.approx({"a": 1.15, "b": 1.25, "c": 1.275})


def test_slabs_of_one_request_land_in_the_order_in_which_they_have_left() -> None:
    """The shorter ones share the link and would be there first; pages of 8 bits mind that.

    Another request's do not wait.
    """
    pair = between(LINK)
    links, pages = EmulatedLinks([pair]), Hold()
    for start, (first, stop), to in (
        (1.0, (0, 250), pages),
        (1.05, (250, 270), pages),
        (1.05, (0, 20), None),
        (1.05, (270, 280), pages),
    ):
        moving = transfer("a", "b", first, stop, to)
        links.hold_back(landed(moving, pair, (first, stop), start))
    found = []
    while (now := links.next_time) is not None:
        found += links.take_landed(now)
    # Four share 2,000 tokens a second: 10 each by 1.07, three 10 more by 1.085, then one alone.
    assert [(each.slab.start, each.slab.stop, each.end) for each in found] == [
        (0, 20, pytest.approx(1.135)),
        (0, 250, pytest.approx(1.2)),
        (250, 270, pytest.approx(1.2)),
        (270, 280, pytest.approx(1.2)),
    ]


def test_slabs_of_other_layers_of_one_request_do_not_wait() -> None:
    """The slabs go to other pages, by a link that is ten times as fast."""
    slow, fast = (
        LinkConfig(between=("g", "h"), gb_s=1e-3),
        LinkConfig(between=("g", "i"), gb_s=1e-2),
    )
    pairs = [between(slow), between(fast, ("g", "i"))]
    links, moving = EmulatedLinks(pairs), transfer("a", "b")
    for pair in pairs:
        links.hold_back(landed(moving, pair, (0, 200), 1.0))
    found = []
    while (now := links.next_time) is not None:
        found += links.take_landed(now)
    assert [(each.slab.pair, each.end) for each in found] == [
        (pairs[1], pytest.approx(1.02)),
        (pairs[0], pytest.approx(1.2)),
    ]


def test_each_way_over_a_link_has_its_rate() -> None:
    there, back = between(LINK), between(LINK, ("h", "g"))
    pairs = [there, back, between(LinkConfig(between=("h", "i"), gb_s=1e-3), ("h", "i"))]
    links = EmulatedLinks(pairs)
    for pair in pairs:
        links.hold_back(landed(transfer("a", "b"), pair, (0, 200), 1.0))
    assert links.take_landed(1.1499) == []
    assert [each.end for each in links.take_landed(1.3)] == pytest.approx([1.15, 1.15, 1.2])


def test_a_slab_that_the_machine_moves_slower_lands_when_it_has() -> None:
    pair = between(LINK)
    links = EmulatedLinks([pair])
    links.hold_back(replace(landed(transfer("a", "b"), pair, (0, 200), 1.0), end=7.0))
    assert [each.end for each in links.take_landed(7.0)] == [7.0]
