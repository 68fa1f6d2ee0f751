"""The real world's clock: arrivals, watchdog; with workers that only pretend."""

import heapq
import queue
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from jaxinfer import JaxinferError
from jaxinfer.runtime import world as worlds
from jaxinfer.runtime.kv.kv_endpoint import ThisProcess
from jaxinfer.runtime.kv.outcome import Failed
from jaxinfer.runtime.world import RealWorld
from jaxinfer.serving.batch import Batch, Transfer
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.system import MoveSlices
from jaxinfer.serving.world import Arrival, InstanceLost, StepDone, Tick, TransferDone


class Clock:
    """Stands for the module ``time`` and for the world's queue: waiting takes no time."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.due: list[tuple[float, int, Any]] = []

    def perf_counter(self) -> float:
        self.now += 1e-6  # Nothing is done in no time.
        return self.now

    def put(self, event: Any, after: float = 0.0) -> None:
        heapq.heappush(self.due, (self.now + after, len(self.due), event))

    def empty(self) -> bool:
        return not self.due or self.due[0][0] > self.now

    def get(self, timeout: float | None = None) -> Any:
        if timeout is None or (self.due and self.due[0][0] <= self.now + timeout):
            time, _, event = heapq.heappop(self.due)
            self.now = max(self.now, time)
            return event
        self.now += timeout
        raise queue.Empty


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(worlds, "time", clock)
    monkeypatch.setattr(worlds.queue, "SimpleQueue", lambda: clock)
    return clock


class Silent:
    """Is launched, and reports what the test has it report."""

    def __init__(self) -> None:
        self.posts: list[Callable[[Any], None]] = []
        self.broken = False

    def launch(self, batch: Batch, origin: float, post: Callable[[Any], None], *_: object) -> None:
        self.posts.append(post)

    def move(self, transfer: Transfer, origin: float, post: Callable[[Any], None]) -> None:
        if self.broken:
            raise RuntimeError("broken")
        self.posts.append(post)


def silent(
    *names: str, watchdog_s: float | None = None, routes: Any = None
) -> tuple[RealWorld, dict[str, Silent]]:
    workers: Any = {name: Silent() for name in names}
    return RealWorld(workers, [], routes, watchdog_s=watchdog_s), workers


def step(name: str) -> Batch:
    return Batch(name, [], 0, 0, 0)


def done(name: str) -> StepDone:
    return StepDone(step(name), [], 0.0, 0.0)


def request(name: str, arrival: float) -> RequestState:
    return RequestState(name, 1, 1, arrival=arrival)


def test_requests_arrive_in_time_and_ticks_each(clock: Clock) -> None:
    world, _ = silent("a")
    world.add([request("late", 20), request("early", 5), request("tied", 5)])
    world.add([request("never", 1e6), request("first", 5 - 1e-3)])
    for when in (10, 2, 2):
        world.wake_at(when)
    seen: list[tuple[str, float]] = []
    while world.now() < 20:
        for event in world.due_events():
            name = event.request.id if isinstance(event, Arrival) else type(event).__name__
            seen.append((name, round(world.now(), 2)))
    assert seen == [
        ("Tick", 2),
        ("Tick", 2),
        ("first", 5),
        ("early", 5),
        ("tied", 5),
        ("Tick", 10),
        ("late", 20),
    ]
    assert world.arrivals_left()
    assert world.waited_s == pytest.approx(20, abs=0.01)
    assert world.launching_s == 0


def test_with_nothing_outstanding_there_are_no_events() -> None:
    world, workers = silent("a")
    assert not world.arrivals_left()
    assert world.due_events() == []
    world.launch(step("a"))
    assert world.launching_s > 0
    workers["a"].posts[0](ended := done("a"))
    assert world.due_events() == [ended]
    assert world.due_events() == []


def test_what_one_instance_fails_with_is_raised_where_nobody_can_go_on() -> None:
    for names, kind in ((["a"], RuntimeError), (["a", "b"], JaxinferError)):
        world, workers = silent(*names)
        world.launch(step("a"))
        workers["a"].posts[0](Failed("a", kind("injected")))
        with pytest.raises(kind, match="injected"):
            world.due_events()


def test_a_mistake_at_launch_is_raised_and_a_failure_is_a_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for kind in (JaxinferError, RuntimeError):
        world, workers = silent("a", "b")

        def launch(*args: object, kind: type[Exception] = kind) -> None:
            raise kind("injected")

        monkeypatch.setattr(workers["a"], "launch", launch)
        if kind is JaxinferError:
            with pytest.raises(JaxinferError, match="injected"):
                world.launch(step("a"))
        else:
            world.launch(step("a"))
            assert world.due_events() == [InstanceLost("a", "RuntimeError: injected")]


def test_nothing_is_heard_of_a_lost_instance() -> None:
    """The lost instance's steps and another failure of it are not told; the other one goes on."""
    world, workers = silent("a", "b")
    for name in ("a", "a", "b"):
        world.launch(step(name))
    first, second = workers["a"].posts
    first(Failed("a", RuntimeError("injected")))
    assert world.due_events() == [InstanceLost("a", "RuntimeError: injected")]
    first(Failed("a", ValueError("again")))
    second(done("a"))
    workers["b"].posts[0](ended := done("b"))
    assert world.due_events() == [ended]
    assert world.lost == {"a": "RuntimeError: injected"}
    assert world.due_events() == []


def test_a_loss_comes_before_all_else(clock: Clock) -> None:
    """Steps that the loop begins there, as it commits earlier ones, are given up with the rest."""
    side: Any = ThisProcess({})
    route: Any = SimpleNamespace(
        pairs=[], sides=(side, side), num_slabs=lambda transfer: 1, send=lambda *args: None
    )
    world, _ = silent("a", "b", routes={("a", "b"): route})
    for _ in range(2):
        world.launch(step("a"))
        clock.put(done("a"))
        clock.put(Failed("b", RuntimeError("injected")))
    assert [type(event) for event in world.due_events()] == [StepDone]
    nothing: Any = None
    world.start_transfer(Transfer(nothing, 0, "a", "b", nothing, nothing, 0, 1, 0.0))
    world.wake_at(0.0)
    kinds = [type(event) for event in world.due_events()]
    assert kinds == [InstanceLost, Tick, StepDone]
    assert world.is_idle


def test_an_instance_that_reports_is_not_given_up(clock: Clock) -> None:
    """An instance with two steps under way, one ending every six of ten seconds, is kept."""
    world, _ = silent("a", "b", watchdog_s=10)
    world.launch(step("a"))
    for _ in range(5):
        world.launch(step("a"))
        clock.put(done("a"), after=6)
        assert [type(event) for event in world.due_events()] == [StepDone]
    assert world.now() == pytest.approx(30, abs=0.01)
    assert world.due_events() == [InstanceLost("a", "it has not reported for 10 s")]
    assert world.now() == pytest.approx(40, abs=0.01)


def test_one_that_hangs_is_given_up_while_another_reports(clock: Clock) -> None:
    world, _ = silent("busy", "hangs", watchdog_s=10)
    world.launch(step("hangs"))
    events: list[Any] = []
    while not any(isinstance(event, InstanceLost) for event in events):
        world.launch(step("busy"))
        clock.put(done("busy"), after=1)
        events += world.due_events()
    assert events[-1] == InstanceLost("hangs", "it has not reported for 10 s")
    assert world.now() == pytest.approx(10, abs=0.01)
    assert 9 <= len(events[:-1]) <= 10


def test_each_instance_has_its_own_time(clock: Clock) -> None:
    world, _ = silent("a", "b", watchdog_s=10)
    world.launch(step("a"))
    clock.now += 4
    world.launch(step("b"))
    for name, when in (("a", 10), ("b", 14)):
        (lost,) = world.due_events()
        assert isinstance(lost, InstanceLost)
        assert (lost.instance, round(world.now(), 2)) == (name, when)


def test_what_is_launched_ahead_is_no_report(clock: Clock) -> None:
    world, _ = silent("a", "b", watchdog_s=10)
    world.launch(step("a"))
    clock.now += 6
    world.launch(step("a"))
    assert world.due_events() == [InstanceLost("a", "it has not reported for 10 s")]
    assert world.now() == pytest.approx(10, abs=0.01)


def test_a_long_launch_is_no_silence(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that nobody compiled ahead may take as long as a watchdog waits."""
    world, workers = silent("a", watchdog_s=10)

    def compiling(*args: Any) -> None:
        clock.now += 12

    monkeypatch.setattr(workers["a"], "launch", compiling)
    world.launch(step("a"))
    assert world.launching_s == pytest.approx(12, abs=0.01)
    clock.put(done("a"), after=9)
    assert [type(event) for event in world.due_events()] == [StepDone]


def test_one_that_was_idle_has_its_time_from_the_launch_on(clock: Clock) -> None:
    world, _ = silent("a", watchdog_s=10)
    for _ in range(2):
        world.launch(step("a"))
        clock.put(done("a"), after=9)
        assert [type(event) for event in world.due_events()] == [StepDone]
        clock.now += 11
        assert world.due_events() == []


def test_whoever_a_route_waits_for_is_given_up_unless_it_reports(clock: Clock) -> None:
    """A gather follows the steps that were launched before it."""
    side: Any = ThisProcess({})
    route: Any = SimpleNamespace(
        pairs=[], sides=(side, side), num_slabs=lambda transfer: 1, send=lambda *args: None
    )
    world, _ = silent("a", "b", watchdog_s=10, routes={("a", "b"): route})
    nothing: Any = None
    world.start_transfer(Transfer(nothing, 0, "a", "b", nothing, nothing, 0, 1, 0.0))
    side.waits_for[1] = "a", clock.now
    world.launch(step("a"))
    clock.put(done("a"), after=9)
    assert [type(event) for event in world.due_events()] == [StepDone]
    (lost,) = world.due_events()
    assert lost == InstanceLost("a", "it has not reported for 10 s")
    assert world.now() == pytest.approx(19, abs=0.01)
    assert world.due_events() == []


def move_of(name: str) -> Transfer:
    nothing: Any = None
    return Transfer(nothing, 0, name, name, nothing, nothing, 0, 1, 0.0, MoveSlices("r", ()))


def test_moves_of_heads_are_waited_for_and_watched(clock: Clock) -> None:
    """A reported move keeps its instance going; one that is not is its end, like a step."""
    world, workers = silent("a", "b", watchdog_s=10)
    world.start_transfer(move_of("a"))
    assert not world.is_idle
    workers["a"].posts[0](ended := TransferDone(move_of("a"), 0.0, 0.0, 5))
    assert world.due_events() == [ended]
    assert world.is_idle
    world.start_transfer(move_of("a"))
    (lost,) = world.due_events()
    assert lost == InstanceLost("a", "it has not reported for 10 s")
    workers["a"].posts[1](ended)
    assert world.due_events() == []
    assert world.is_idle


def test_a_move_of_heads_that_fails_is_its_instance_s_end(clock: Clock) -> None:
    world, workers = silent("a", "b")
    world.start_transfer(move_of("a"))
    workers["a"].posts[0](Failed("a", RuntimeError("no memory")))
    assert world.due_events() == [InstanceLost("a", "RuntimeError: no memory")]
    workers["b"].broken = True
    world.start_transfer(move_of("b"))
    assert world.due_events() == [InstanceLost("b", "RuntimeError: broken")]


def test_transfers_that_the_real_world_does_not_know() -> None:
    world, _ = silent("a", "b")
    nothing: Any = None
    with pytest.raises(JaxinferError, match="from a to b, which its routes do not name"):
        world.start_transfer(Transfer(nothing, 0, "a", "b", nothing, nothing, 0, 1, 0.0))


def test_a_world_that_is_drained_waits_for_steps_alone(clock: Clock) -> None:
    """Not for what would have arrived, nor for ticks."""
    workers: dict[str, Any] = {"a": Silent()}
    more = [True]
    world = RealWorld(workers, [], more_to_come=lambda: more[0])
    assert world.is_idle
    assert world.arrivals_left()
    more.clear()
    more.append(False)
    assert not world.arrivals_left()
    world.add([RequestState("late", 1, 1, arrival=100.0)])
    world.wake_at(100.0)
    assert not world.is_idle
    world.launch(step("a"))
    clock.put(done("a"), after=5)
    world.drain()
    assert world.now() == pytest.approx(5, abs=0.01)
    assert world.is_idle
    assert not world.arrivals_left()
    assert world.due_events() == []
