"""Fair shares of links: known examples, and what max-min fairness means."""

import math
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.hardware.network import Network


def drain(network: Network[str]) -> dict[str, float]:
    """Return the time at which each flow ends."""
    ends = {}
    while (end := network.next_end) is not None:
        for tag in network.take_ended(end):
            ends[tag] = end
    return ends


def test_one_flow_has_the_link_to_itself() -> None:
    network: Network[str] = Network({"x": 10.0})
    network.start("a", ["x"], 50.0, now=3.0)
    assert drain(network) == {"a": 8.0}


def test_two_flows_share_until_one_ends() -> None:
    """10 B/s: a has 40 B from 0 on, b 20 B from 2 on: 20 B, then 5 B/s each until 6."""
    network: Network[str] = Network({"x": 10.0})
    network.start("a", ["x"], 40.0, now=0.0)
    network.start("b", ["x"], 20.0, now=2.0)
    assert drain(network) == {"a": 6.0, "b": 6.0}
    network.start("c", ["x"], 30.0, now=10.0)
    network.start("d", ["x"], 10.0, now=10.0)
    assert drain(network) == {"d": 12.0, "c": 14.0}


def test_what_one_link_holds_back_another_flow_takes() -> None:
    """The textbook line of two links: the long flow is held to 1 by x, y gives the rest to c."""
    network: Network[str] = Network({"x": 2.0, "y": 10.0})
    network.start("long", ["x", "y"], 4.0, now=0.0)
    network.start("b", ["x"], 4.0, now=0.0)
    network.start("c", ["y"], 36.0, now=0.0)
    assert drain(network) == {"long": 4.0, "b": 4.0, "c": 4.0}


@given(
    capacities=st.lists(st.floats(1, 100), min_size=1, max_size=4),
    paths=st.lists(st.sets(st.integers(0, 3), min_size=1, max_size=3), min_size=1, max_size=6),
)
def test_rates_are_max_min_fair(capacities: list[float], paths: list[set[int]]) -> None:
    """Each flow has a full link on which nobody is faster: Bertsekas and Gallager's criterion."""
    network: Network[int] = Network(dict(enumerate(capacities)))
    paths = [{link % len(capacities) for link in path} for path in paths]
    for number, path in enumerate(paths):
        network.start(number, sorted(path), 1000.0, now=0.0)
    assert network.next_end is not None  # It asks for the rates.
    rates = {tag: way.rate for way in network._ways.values() for tag in way.flows.values()}
    used: dict[int, float] = defaultdict(float)
    for number, path in enumerate(paths):
        for link in path:
            used[link] += rates[number]
    for link, total in used.items():
        assert total <= capacities[link] * (1 + 1e-9)
    for number, path in enumerate(paths):
        assert any(
            used[link] == pytest.approx(capacities[link])
            and all(
                rates[other] <= rates[number] * (1 + 1e-9)
                for other, theirs in enumerate(paths)
                if link in theirs
            )
            for link in path
        )


@given(
    capacities=st.lists(st.floats(0.1, 1e3), min_size=1, max_size=3),
    flows=st.lists(
        st.tuples(st.sets(st.integers(0, 2), min_size=1), st.floats(1, 1e9), st.floats(0, 1e3)),
        min_size=1,
        max_size=12,
    ),
)
def test_time_does_not_run_back_and_no_link_idles(
    capacities: list[float], flows: list[tuple[set[int], float, float]]
) -> None:
    """A link that all flows cross is done when all bytes have crossed it, whoever starts when."""
    network: Network[int] = Network(dict(enumerate(capacities)) | {"all": 0.05})
    now, ended, done = 0.0, 0, 0.0
    for number, (links, num_bytes, gap) in enumerate(flows):
        path = ["all", *sorted({link % len(capacities) for link in links})]
        start = now + gap
        while (end := network.next_end) is not None and end <= start:
            assert end >= now
            now, ended = end, ended + len(network.take_ended(end))
        now = start
        network.start(number, path, num_bytes, now)
        done = max(done, now) + num_bytes / 0.05
    while (end := network.next_end) is not None:
        assert end >= now
        now, ended = end, ended + len(network.take_ended(end))
    assert ended == len(flows)
    assert now == pytest.approx(done, rel=1e-6)


def test_flows_that_end_together_are_told_in_the_order_of_their_start() -> None:
    network: Network[str] = Network({"x": 10.0, "y": 5.0})
    for tag, path, num_bytes in (("b", ["y"], 25.0), ("a", ["x"], 50.0), ("c", ["y"], 90.0)):
        network.start(tag, path, num_bytes, now=1.0)
    assert network.next_end == 6.0
    assert network.take_ended(5.9) == []
    # y's two share it: b has 12.5 B left at 6.
    assert network.take_ended(6.0) == ["a"]
    network.start("d", ["x"], 50.0, now=6.0)
    assert network.next_end == 11.0
    assert network.take_ended(11.0) == ["b", "d"]
    assert drain(network) == {"c": 1 + 115 / 5}
    assert network.next_end is None


def test_rounding_does_not_end_a_flow_in_the_past() -> None:
    """The rest of flow a is the last bit of its end; rounding makes it less than nothing."""
    network: Network[str] = Network({"x": 82.0, "y": 1.0})
    network.start("a", ["x"], 92.0, now=0.6816364556074682)
    now = 1.8035876751196633
    assert network.next_end == math.nextafter(now, math.inf)
    network.start("b", ["y"], 1.0, now)
    assert network.next_end == now
    assert network.take_ended(now) == ["a"]
