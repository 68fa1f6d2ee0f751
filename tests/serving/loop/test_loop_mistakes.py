"""Mistakes of systems: errors of one line, and stalls."""

from typing import Any

import pytest
from fake_world import FakeWorld, Timing
from loop_cases import Do, follow, tiny
from scenarios import Follow
from serving_checks import Run, make_requests

from jaxinfer.errors import JaxinferError
from jaxinfer.serving import loop as loop_module
from jaxinfer.serving.loop import ServingLoop
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.system import Action, Assignment, MoveSlices, Pause, Reassign, System
from jaxinfer.serving.views import ClusterView, Leg


def test_slices_that_are_not_there() -> None:
    run = Run(Do(MoveSlices("r0", ((0, 1, (0,)),))), [tiny("A", 20)], make_requests([(3, 9)]))
    with pytest.raises(JaxinferError, match="not there to move"):
        run.verify()


def test_a_system_that_routes_what_does_not_wait() -> None:
    class Twice(System):
        def route(self, waiting, cluster):  # type: ignore[no-untyped-def]
            return [Assignment("r0", (Leg("A"),))] * 2

    with pytest.raises(JaxinferError, match="'r0', which does not wait"):
        Run(Twice(), [tiny("A", 20)], make_requests([(3, 9)])).verify()


def test_a_system_that_gives_no_leg() -> None:
    with pytest.raises(JaxinferError, match="'r0' no leg past 0"):
        follow([(Leg("A", 0),)], [tiny("A", 20)], [(3, 9)])


LEGS = "must be a number of KV entries, or None for the request's end"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "Answers.route returns None, must be a sequence of assignments"),
        (3, "Answers.route returns 3, must be a sequence of assignments"),
        (
            Assignment("r0", (Leg("A"),)),
            "Answers.route returns Assignment(request='r0', legs=(Leg(",
        ),
        ([("r0", Leg("A"))], "Answers.route returns [('r0', Leg(instance='A', "),
        ([Assignment("r0", Leg("A"))], "gives 'r0' the legs Leg(instance='A'"),  # type: ignore[arg-type]
        ([Assignment("r0", ("A",))], "gives 'r0' the legs ('A',), must be a tuple"),  # type: ignore[arg-type]
        ([Assignment("r0", (Leg("A", -5), Leg("A")))], f"a leg on 'A' until -5, {LEGS}"),
        ([Assignment("r0", (Leg("A", 2.5), Leg("A")))], f"a leg on 'A' until 2.5, {LEGS}"),  # type: ignore[arg-type]
        ([Assignment("r0", (Leg("A", 3, "late"),))], "with hand_off 'late', must be one of on_d"),  # type: ignore[arg-type]
    ],
)
def test_a_system_whose_route_answers_wrongly(answer: Any, message: str) -> None:
    class Answers(System):
        def route(self, waiting, cluster):  # type: ignore[no-untyped-def]
            return answer

    with pytest.raises(JaxinferError) as caught:
        Run(Answers(), [tiny("A", 20)], make_requests([(3, 9)])).verify()
    assert message in str(caught.value)


@pytest.mark.parametrize("hook", ["on_step", "on_tick"])
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "returns None, must be a sequence of actions"),
        (["r0"], "returns ['r0'], must be a sequence of actions"),
        ([Reassign("r0", (Leg("A", -1),))], f"until -1, {LEGS}"),
        ([Reassign("r0", Leg("A"))], "must be a tuple of Leg"),  # type: ignore[arg-type]
    ],
)
def test_a_system_whose_hooks_answer_wrongly(hook: str, answer: Any, message: str) -> None:
    class Answers(System):
        tick_interval = 1.0 if hook == "on_tick" else None

        def route(self, waiting, cluster):  # type: ignore[no-untyped-def]
            return [Assignment(request.id, (Leg("A"),)) for request in waiting]

    setattr(Answers, hook, lambda *_: answer)
    with pytest.raises(JaxinferError) as caught:
        Run(Answers(), [tiny("A", 20)], make_requests([(3, 9)])).verify()
    assert message in str(caught.value)
    if "returns" in message:
        assert str(caught.value).startswith(f"Answers.{hook} ")


def test_a_system_may_answer_with_any_iterable() -> None:
    class Generates(System):
        def route(self, waiting, cluster):  # type: ignore[no-untyped-def]
            return (Assignment(request.id, (Leg("A"),)) for request in waiting)

        def on_step(self, step, cluster):  # type: ignore[no-untyped-def]
            return iter(())

    outcome = Run(Generates(), [tiny("A", 20)], make_requests([(3, 9)])).verify()
    assert outcome.route_of("r0") == [("A", 11)]


@pytest.mark.parametrize("action", [None, Pause("r1")])
def test_a_system_that_stalls_is_named(action: Action | None) -> None:
    class Idle(System):
        def route(self, waiting, cluster):  # type: ignore[no-untyped-def]
            return []

    system = Do(action) if action else Idle()
    name, left = ("Do", 1) if action else ("Idle", 2)
    with pytest.raises(JaxinferError, match=f"{name} has stalled: {left} requests are left .*r1"):
        Run(system, [tiny("A", 20)], make_requests([(3, 9)] * 2)).verify()


def test_a_system_whose_ticks_change_nothing_has_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    class Idle(System):
        tick_interval = 1.0

        def route(self, waiting, cluster):  # type: ignore[no-untyped-def]
            return []

    monkeypatch.setattr(loop_module, "MAX_IDLE_TICKS", 10)
    with pytest.raises(JaxinferError, match="Idle has stalled: 1 requests are left"):
        Run(Idle(), [tiny("A", 20)], make_requests([(3, 9)])).verify()


def test_requests_that_come_once_the_last_is_given_up() -> None:
    """Continuations, which wait for another's prompt, come after the loss and are lost too."""

    class OnlyA(System):
        def route(self, waiting, cluster: ClusterView):  # type: ignore[no-untyped-def]
            return [Assignment(r.id, (Leg("A"),)) for r in waiting if "A" in cluster.instances]

    instances = [tiny("A", 20), tiny("B", 20)]
    first, second = make_requests([(3, 9)] * 2)
    world = FakeWorld(instances, [first], Timing(lost={"A": 2.0}))
    finished = []

    def on_finish(request: RequestState) -> None:
        finished.append((request.id, request.finish_reason))
        if request is first:
            world.add(second)

    ServingLoop(world, instances, OnlyA(), on_finish=on_finish, on_event=world.committed).run()
    assert finished == [(first.id, "lost"), (second.id, "lost")]


def test_two_requests_with_one_id() -> None:
    requests = make_requests([(3, 9)]) * 2
    with pytest.raises(ValueError, match="'r0'"):
        ServingLoop(FakeWorld([], requests), [], Follow({})).run()
