"""The simulated world by itself: ends of steps and landings of KV, by hand."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from modelled_world import modelled_world

from jaxinfer import JaxinferError
from jaxinfer.hardware.network import Link
from jaxinfer.serving.batch import Batch, Row, ShardWork, Transfer, Work
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.system import MoveSlices
from jaxinfer.serving.world import Arrival, StepDone, Tick, TransferDone
from jaxinfer.simulate.spread import ShardCost, Visit
from jaxinfer.simulate.stage_path import StagePath
from jaxinfer.simulate.world import SimulatedWorld


@dataclass
class Given:
    """Stages that take a share of a second for each token, and hops likewise."""

    stage: Sequence[float]
    hop: Sequence[float] = ()

    def stages(self, work: Work) -> list[float]:
        return [seconds * work.tokens for seconds in self.stage]

    def hops(self, work: Work) -> list[float]:
        return [seconds * work.tokens for seconds in self.hop]


def request(name: str = "r", arrival: float = 0.0) -> RequestState:
    return RequestState(name, 100, 10, arrival)


def batch(*counts: int, transfers: Sequence[Transfer] = ()) -> Batch:
    """Chunks of so many tokens, of which the first two sample."""
    hold: Any = SimpleNamespace(kv=SimpleNamespace(is_spread=False))
    rows = [Row(request(), 0, count, i < 2, False, 0, hold) for i, count in enumerate(counts)]
    return Batch("i", rows, 0, 0, 0, transfers=list(transfers))


def transfer(start: int, stop: int, **more: Any) -> Transfer:
    hold: Any = None
    return Transfer(request(), 0, "i", "j", hold, hold, start, stop, 0.0, **more)


def world(
    cost: Given,
    devices: Sequence[int] = (0,),
    lanes: Sequence[StagePath] = (),
    capacities: dict[Link, float] | None = None,
    segments: int = 1,
    requests: Sequence[RequestState] = (),
) -> SimulatedWorld:
    return modelled_world(
        {"i": cost},
        {"i": segments},
        {"i": devices},
        {("i", "j"): lanes} if lanes else {},
        capacities or {},
        requests,
    )


def step(modelled: SimulatedWorld) -> StepDone:
    (event,) = modelled.due_events()
    assert isinstance(event, StepDone)
    assert modelled.now() == event.end == event.stages[-1][1]
    assert event.start == event.stages[0][0]
    return event


def test_stages_wait_for_the_one_before_and_for_their_device() -> None:
    """Stages of 2 and 3 s with half a second between: the second step waits for either."""
    modelled = world(Given((2.0, 3.0), (0.5,)), (0, 1))
    assert modelled.now() == 0
    for _ in range(3):
        modelled.launch(batch(1))
    assert step(modelled).stages == [(0, 2), (2.5, 5.5)]
    assert step(modelled).stages == [(2, 4), (5.5, 8.5)]
    assert step(modelled).stages == [(4, 6), (8.5, 11.5)]
    modelled.wake_at(20.0)
    assert modelled.due_events() == [Tick()]
    modelled.launch(batch(2))
    assert step(modelled).stages == [(20, 24), (25, 31)]
    assert modelled.due_events() == []
    assert modelled.now() == 31


def test_a_slow_first_stage_leaves_the_second_one_waiting() -> None:
    modelled = world(Given((3.0, 1.0), (0.25,)), (0, 1))
    modelled.launch(batch(1))
    modelled.launch(batch(1))
    assert step(modelled).stages == [(0, 3), (3.25, 4.25)]
    assert step(modelled).stages == [(3, 6), (6.25, 7.25)]


def test_each_hop_takes_its_own_time() -> None:
    modelled = world(Given((1.0, 1.0, 1.0), (0.25, 0.5)), (0, 1, 2))
    modelled.launch(batch(2))
    assert step(modelled).stages == [(0, 2), (2.5, 4.5), (5.5, 7.5)]


def test_stages_of_one_device_take_turns() -> None:
    """Two pieces on device 0 and one on device 1: a step gives the device both at once."""
    modelled = world(Given((1.0, 2.0, 4.0), (0.0, 0.0)), (0, 0, 1))
    modelled.launch(batch(1))
    modelled.launch(batch(1))
    assert step(modelled).stages == [(0, 1), (1, 3), (3, 7)]
    assert step(modelled).stages == [(3, 4), (4, 6), (7, 11)]


def test_a_token_for_each_row_that_samples() -> None:
    modelled = world(Given((1.0,)))
    modelled.launch(batch(3, 4, 5))
    done = step(modelled)
    assert done.tokens == [0, 0]
    assert done.batch.work.tokens == done.end == 12


def landing(modelled: SimulatedWorld) -> TransferDone:
    while True:
        for event in modelled.due_events():
            if isinstance(event, TransferDone):
                assert event.end == modelled.now()
                return event


@pytest.mark.parametrize(("y", "end"), [(1000.0, 12.25), (25.0, 31.5)])
def test_each_stage_sends_its_pieces_as_they_end(y: float, end: float) -> None:
    """Stages of 4 and 6 s in two pieces each, of 500 B over x and 300 B over y.

    Over x, at 100 B/s: from 2 on, the other half from 4 on. At 4, 300 B of the first are left,
    which take 6 s at half the rate; at 10, 200 B of the second are left, for 2 s and the latency.
    Over y, from 7 on and from 10 on: at 25 B/s, all 600 B have left 24 s after the first.
    """
    lanes = [StagePath(0, 100, ["x"], 0.25), StagePath(1, 60, ["y"], 0.5)]
    modelled = world(Given((4.0, 6.0), (0.0,)), (0, 1), lanes, {"x": 100.0, "y": y}, 2)
    sent = transfer(10, 20)
    modelled.launch(batch(1, transfers=[sent]))
    done = landing(modelled)
    assert done.transfer is sent
    assert (done.start, done.end, done.num_bytes) == pytest.approx((2.0, end, 1600))


def test_what_exists_leaves_at_once_and_has_landed_with_its_last_lane() -> None:
    """1000 B and 600 B share 100 B/s from 5 on: 600 B of each by 17, the other 400 by 21."""
    lanes = [StagePath(0, 100, ["x"], 0.0), StagePath(1, 60, ["x"], 9.0)]
    modelled = world(Given((1.0,)), lanes=lanes, capacities={"x": 100.0}, segments=8)
    modelled.wake_at(5.0)
    assert modelled.due_events() == [Tick()]
    modelled.start_transfer(transfer(30, 40))
    done = landing(modelled)
    assert (done.start, done.end, done.num_bytes) == pytest.approx((5.0, 26.0, 1600))


def test_all_that_happens_at_one_moment_comes_together() -> None:
    """Arrivals first, whatever was known first; then ticks, then steps."""
    arriving = [request("a", 1.0), request("b", 3.0), request("c", 3.0), request("d", 4.0)]
    modelled = world(Given((3.0,)), requests=arriving)
    modelled.launch(batch(1))
    modelled.wake_at(3.0)
    assert modelled.arrivals_left()
    assert modelled.due_events() == [Arrival(arriving[0])]
    first, second, tick, done = modelled.due_events()
    assert (first, second) == (Arrival(arriving[1]), Arrival(arriving[2]))
    assert isinstance(done, StepDone)
    assert tick == Tick()
    assert modelled.arrivals_left()
    assert modelled.due_events() == [Arrival(arriving[3])]
    assert not modelled.arrivals_left()
    assert modelled.due_events() == []


def test_steps_that_end_at_one_time_come_by_launch_then_by_instance() -> None:
    names = ("a", "b", "c")
    costs = {"a": Given((2.0,)), "b": Given((2.0,)), "c": Given((3.0,))}
    ones, devices = dict.fromkeys(names, 1), dict.fromkeys(names, (0,))
    modelled = modelled_world(costs, ones, devices, {}, {}, [])
    for name in reversed(names):
        modelled.launch(replace(batch(1), instance=name))
        if name == "c":
            modelled.wake_at(1.0)
            assert modelled.due_events() == [Tick()]
    ended = [event.instance for event in modelled.due_events() if isinstance(event, StepDone)]
    assert ended == ["c", "a", "b"]


def test_kv_that_cannot_go_is_refused() -> None:
    lanes = [StagePath(0, 100, ["x"], 0.0)]
    modelled = world(Given((1.0,)), lanes=lanes, capacities={"x": 100.0})
    modelled.start_transfer(transfer(0, 1))
    with pytest.raises(JaxinferError, match="hands KV from i to j, which its routes do not name"):
        world(Given((1.0,))).start_transfer(transfer(0, 1))


def test_kv_heads_have_moved_with_the_last_of_them() -> None:
    """Ten tokens: two heads of 5 B each over x, one of 20 B over y, both at 100 B/s."""
    between = {(0, 1): StagePath(0, 5, ["x"], 0.5), (1, 0): StagePath(0, 20, ["y"], 0.25)}
    modelled = modelled_world(
        {}, {}, {}, {}, {"x": 100.0, "y": 100.0}, [], slice_lanes={"i": between}
    )
    modelled.wake_at(3.0)
    assert modelled.due_events() == [Tick()]
    move = MoveSlices("r", ((0, 1, (4, 6)), (1, 0, (5,))))
    modelled.start_transfer(transfer(0, 10, slice_move=move))
    done = landing(modelled)
    assert (done.start, done.end, done.num_bytes) == pytest.approx((3.0, 5.25, 300))


@pytest.mark.parametrize(
    ("busy", "steps"),
    [
        (1, [[(0, 4), (4, 8)], [(4, 8), (8, 12)], [(8, 12), (12, 16)]]),
        (3, [[(0, 4), (4, 8)], [(4, 10), (10, 14)], [(10, 16), (16, 20)]]),
    ],
)
def test_stages_take_turns_with_what_they_share(
    busy: int, steps: list[list[tuple[int, int]]]
) -> None:
    """Stages of 4 s, each of which keeps one group busy meanwhile: for both, 6 s are the least.

    Three seconds from 4 on are the first step's in the second stage; then come the second step's.
    """
    cost = ShardCost(0, 1, 0.0, 0.5)
    visits = [[Visit(("w", 0), 1, cost, 2)], [Visit(("w", 0), 3, cost, 2)]]
    stages = Given((4.0, 4.0), (0.0,))
    modelled = modelled_world(
        {"i": stages}, {"i": 1}, {"i": (0, 1)}, {}, {}, [], visits={"i": visits}
    )
    for _ in steps:
        launched = batch(1)
        launched.work.shards = [ShardWork(), ShardWork(1, busy), ShardWork(), ShardWork(1, busy)]
        modelled.launch(launched)
    assert [step(modelled).stages for _ in steps] == steps
