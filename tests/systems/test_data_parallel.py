"""Weighted round-robin with limits of the queues, on hand-made views and in the fake world."""

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from fake_world import Timing
from hypothesis import given
from hypothesis import strategies as st
from properties import examples
from serving_checks import Run, make_kv, make_requests, new_instance

from jaxinfer.errors import JaxinferError
from jaxinfer.serving.instance_options import InstanceOptions
from jaxinfer.serving.loop import ServingLoop
from jaxinfer.serving.views import ClusterView, Leg
from jaxinfer.systems.data_parallel import DataParallel, DataParallelOptions

PAPER = {"strong": (3, 3), "weak": (1, 1)}


def make(shares: dict[str, tuple[int, int]]) -> DataParallel:
    options = {name: {"weight": w, "max_waiting": n} for name, (w, n) in shares.items()}
    return DataParallel(DataParallelOptions.model_validate({"shares": options}))


def route(system: DataParallel, count: int, **waiting: int) -> list[str]:
    """Return the instances of ``count`` requests, with so many in the queues."""
    view = ClusterView(
        0.0,
        {name: SimpleNamespace(waiting=[None] * n) for name, n in waiting.items()},  # type: ignore[misc]
    )
    requests = [SimpleNamespace(id=f"r{i}") for i in range(count)]
    assignments = system.route(requests, view)  # type: ignore[arg-type]
    assert [a.request for a in assignments] == [f"r{i}" for i in range(len(assignments))]
    for assignment in assignments:
        (leg,) = assignment.legs
        assert leg == Leg(leg.instance)
    return [assignment.legs[0].instance for assignment in assignments]


def letters(names: Sequence[str]) -> str:
    return "".join(name[0] for name in names)


def test_three_to_one() -> None:
    system = make({"strong": (3, 100), "weak": (1, 100)})
    assert letters(route(system, 10, strong=0, weak=0)) == "ssswssswss"
    # The round goes on where it was.
    assert letters(route(system, 3, strong=0, weak=0)) == "sws"


def test_one_by_one_is_as_all_at_once() -> None:
    system = make(PAPER)
    assert letters([route(system, 1, strong=0, weak=0)[0] for _ in range(12)]) == "sssw" * 3


def test_limits_of_the_paper() -> None:
    system = make(PAPER)
    assert letters(route(system, 10, strong=0, weak=0)) == "sssw"
    assert route(system, 10, strong=3, weak=1) == []
    assert letters(route(system, 10, strong=2, weak=1)) == "s"
    assert letters(route(system, 10, strong=3, weak=0)) == "w"


def test_an_instance_at_its_limit_is_skipped() -> None:
    assert letters(route(make(PAPER), 1, strong=3, weak=0)) == "w"
    assert letters(route(make(PAPER), 10, strong=0, weak=1)) == "sss"
    # Over its limit: it has preempted requests.
    assert letters(route(make(PAPER), 10, strong=7, weak=0)) == "w"
    assert letters(route(make({"strong": (3, 9), "weak": (1, 1)}), 9, strong=0, weak=1)) == "s" * 9


def test_a_round_without_room_takes_no_turn() -> None:
    system = make(PAPER)
    assert letters(route(system, 2, strong=0, weak=0)) == "ss"
    assert route(system, 5, strong=3, weak=1) == []
    assert letters(route(system, 4, strong=0, weak=0)) == "swss"


def test_an_instance_that_is_gone_is_skipped() -> None:
    assert letters(route(make(PAPER), 10, strong=0)) == "sss"
    assert letters(route(make(PAPER), 10, weak=0)) == "w"


def test_one_share_per_instance() -> None:
    system = make(PAPER)
    system.check(["weak", "strong"])
    assert not list(system.routes(["weak", "strong"]))
    assert not any((system.needs_decode_rows, system.needs_fits, system.ttft_counts_transfer))
    for names, message in (
        (["strong", "weak", "third"], "shares: instance 'third' has none"),
        (["strong"], "shares.weak: known: strong"),
        (["strong", "weal"], "shares.weak: did you mean 'weal'?"),
    ):
        with pytest.raises(JaxinferError) as error:
            system.check(names)
        assert str(error.value) == message


@examples(100)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6)), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(0, 7), min_size=4, max_size=4))),
)
def test_any_shares(shares: list[tuple[int, int]], rounds: list[tuple[int, list[int]]]) -> None:
    """The choice against turns taken one after the other by hand."""
    names = ["p", "q", "r", "s"][: len(shares)]
    system = make(dict(zip(names, shares, strict=True)))
    turns = [name for name, (weight, _) in zip(names, shares, strict=True) for _ in range(weight)]
    at = 0
    for count, queues in rounds:
        waiting = dict(zip(names, queues, strict=False))
        room = {name: most - waiting[name] for name, (_, most) in zip(names, shares, strict=True)}
        expected = []
        while len(expected) < count and any(free > 0 for free in room.values()):
            name = turns[at]
            at = (at + 1) % len(turns)
            if room[name] > 0:
                room[name] -= 1
                expected.append(name)
        assert route(system, count, **waiting) == expected


@pytest.mark.parametrize("seed", range(4))
def test_in_the_fake_world(seed: int) -> None:
    """Requests stay where they are; queues keep their limits; weights decide."""
    longest = Counter[str]()

    def watch(loop: ServingLoop) -> None:
        for name, instance in loop.assignments.instances.items():
            longest[name] = max(longest[name], len(instance.waiting))

    options = InstanceOptions(max_num_seqs=1, max_num_batched_tokens=8)
    pool = [new_instance(name, make_kv(40, 4), options) for name in PAPER]
    requests = make_requests([(12, 4)] * 24)
    outcome = Run(make(PAPER), pool, requests, Timing(seed, 2), watch=watch).verify()
    homes = Counter(route[0][0] for name in outcome.finished if (route := outcome.route_of(name)))
    assert all(len(outcome.route_of(name)) == 1 for name in outcome.finished)
    assert not outcome.world.transfers
    assert longest == {"strong": 3, "weak": 1}
    assert homes["strong"] + homes["weak"] == 24
    assert min(homes.values()) >= 6
