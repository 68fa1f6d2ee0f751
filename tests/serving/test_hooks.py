"""Calls of a system: legs' ends and requests' ends, each once, with all of its own there."""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples
from scenarios import Chaos, Follow, Scenario, Survivor, scenarios
from schedules import Plan, pool, serve, unit

from jaxinfer.errors import JaxinferError
from jaxinfer.serving.hooks import Hooks
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.system import Assignment, Reassign, System
from jaxinfer.serving.views import ClusterView, Leg, RequestView


class Hears(System):
    """Keeps what it hears, and asserts that the cluster looks as it says there."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.leg_ends: dict[str, list[Leg]] = {}
        self.finished: Counter[str] = Counter()
        self.times: list[tuple[str, str, float, int]] = []

    def on_leg_end(self, request: RequestView, leg: Leg, cluster: ClusterView) -> None:
        assert isinstance(request, RequestState)
        assert request.computed == leg.until
        assert not self.finished[request.id]
        here = [name for name, i in cluster.instances.items() if is_in(request, i)]
        assert here == [leg.instance for leg in request.legs[:1]]
        self.leg_ends.setdefault(request.id, []).append(leg)
        self.times.append(("leg", request.id, cluster.now, request.num_known))

    def on_finish(self, request: RequestView, cluster: ClusterView) -> None:
        assert not any(is_in(request, instance) for instance in cluster.instances.values())
        assert (list(request.legs), request.slices, request.computed) == ([], [], 0)
        assert isinstance(request, RequestState)
        assert request.finish_reason
        self.finished[request.id] += 1
        self.times.append(("end", request.id, cluster.now, request.num_known))


def is_in(request: Any, instance: Any) -> bool:
    here = [*instance.waiting, *instance.importing.values(), *instance.running.values()]
    return request in here


class FollowHears(Hears, Follow):
    pass


class SurvivorHears(Hears, Survivor):
    pass


class ChaosHears(Hears, Chaos):
    pass


@examples(200)
@given(scenarios())
def test_each_leg_that_the_request_goes_on_from(scenario: Scenario) -> None:
    system = FollowHears(scenario.by_id)
    outcome = scenario.run(system).verify()
    for name, script in scenario.by_id.items():
        # The last token is sampled as its predecessor's entry is written: that is the end.
        entries = script.prompt_len + min(script.stop_at or 99, script.max_tokens) - 1
        ended = [leg for leg in script.legs if leg.until is not None and leg.until < entries]
        assert system.leg_ends.get(name, []) == ended
    assert system.finished == Counter(list(outcome.finished))
    ends = {name: (now, known) for hook, name, now, known in system.times if hook == "end"}
    assert ends == {
        name: (outcome.ended[name], request.num_known) for name, request in outcome.finished.items()
    }


@examples(150)
@given(scenarios(), st.integers(0, 2**16), st.integers(1, 30))
def test_whatever_the_system_does(scenario: Scenario, seed: int, actions: int) -> None:
    system = ChaosHears(scenario.by_id, seed, actions, scenario.caching)
    outcome = scenario.run(system).verify()
    assert system.finished == Counter(list(outcome.finished))


@examples(150)
@given(scenarios(), st.data())
def test_also_with_lost_instances(scenario: Scenario, data: st.DataObject) -> None:
    names = [name for name, *_ in scenario.instances]
    lost = data.draw(st.lists(st.sampled_from(names), unique=True))
    times = {name: float(data.draw(st.integers(0, 60))) for name in lost}
    scenario = replace(scenario, timing=replace(scenario.timing, lost=times))
    system = SurvivorHears(scenario.by_id)
    outcome = scenario.run(system).verify()
    assert system.finished == Counter(list(outcome.finished))


class Planned(Hears, Plan):
    pass


def heard(legs: dict[str, tuple[Leg, ...]], lengths: Sequence[tuple[int, int]], **more: Any) -> Any:
    timing = more.pop("timing", unit())
    system = Planned(legs, more.get("actions"))
    serve(system, [pool("A"), pool("B")], lengths, timing=timing)
    return system.times, system.leg_ends


def test_a_schedule_by_hand() -> None:
    """Four tokens a step: six of the prompt take A two seconds; one to send, two steps of B."""
    legs = {"r0": (Leg("A", 3), Leg("A", 6), Leg("B"))}
    times, ends = heard(legs, [(6, 3)])
    # Cut at 3, then at 6, with whose end the first token is there.
    assert times == [("leg", "r0", 1, 6), ("leg", "r0", 2, 7), ("end", "r0", 5, 9)]
    assert ends == {"r0": [Leg("A", 3), Leg("A", 6)]}


def test_a_request_that_ends_with_its_leg_has_only_ended() -> None:
    times, ends = heard({"r0": (Leg("A", 4), Leg("B"))}, [(4, 1)])
    assert (times, ends) == ([("end", "r0", 1, 5)], {})


def test_a_leg_that_is_cut_short_ends_where_it_is_cut() -> None:
    times, ends = heard(
        {"r0": (Leg("A"),)}, [(12, 1)], actions={0.5: [Reassign("r0", (Leg("B"),))]}
    )
    assert ends == {"r0": [Leg("A", 4)]}
    assert times[0] == ("leg", "r0", 1, 12)


def test_a_lost_leg_is_no_end_and_a_request_that_fails_has_one() -> None:
    legs = {"r0": (Leg("A", 8), Leg("A"))}
    times, _ = heard(legs, [(8, 3)], timing=unit(lost={"A": 1.5}))
    assert times == [("end", "r0", 1.5, 8)]


def test_a_request_that_no_pool_can_hold_has_ended() -> None:
    times, _ = heard({"r0": (Leg("A"),)}, [(60, 3)])
    assert times == [("end", "r0", 0, 60)]


class LooksForTheLost(Planned):
    def on_finish(self, request: RequestView, cluster: ClusterView) -> None:
        super().on_finish(request, cluster)
        cluster.instances["B"].num_requests  # noqa: B018


def test_a_hook_may_look_for_an_instance_that_is_lost() -> None:
    system = LooksForTheLost({"r0": (Leg("A"),)})
    serve(system, [pool("A"), pool("B")], [(4, 3)], timing=unit(lost={"B": 0.5}))
    assert system.times == [("end", "r0", 3, 7)]


@pytest.mark.parametrize(("hook", "at"), [("on_leg_end", 4), ("on_finish", 9)])
def test_hooks_return_nothing(hook: str, at: int) -> None:
    class Answers(System):
        def route(self, waiting: Any, cluster: ClusterView) -> list[Assignment]:
            return [Assignment(r.id, (Leg("A", at), Leg("B"))) for r in waiting]

    setattr(Answers, hook, lambda *asked: [Reassign("r0", (Leg("A"),))])
    with pytest.raises(JaxinferError, match=rf"Answers\.{hook} returns \[Reassign.*must return no"):
        serve(Answers(), [pool("A"), pool("B")], [(6, 3)])


@pytest.mark.parametrize("hook", ["route", "on_step", "on_tick", "on_leg_end", "on_finish"])
def test_what_a_hook_raises_names_it(hook: str) -> None:
    class Raises(System):
        def route(self, waiting: Any, cluster: ClusterView) -> list[Assignment]:
            return [Assignment(r.id, (Leg("A", 4), Leg("B"))) for r in waiting]

    Raises.tick_interval = 1.5 if hook == "on_tick" else None
    setattr(Raises, hook, lambda *asked: {}["seen"])
    message = rf"^Raises\.{hook} raises KeyError: 'seen' \(.*test_hooks\.py, line \d+\)$"
    with pytest.raises(JaxinferError, match=message) as error:
        serve(Raises(), [pool("A"), pool("B")], [(6, 3)])
    assert isinstance(error.value.__cause__, KeyError)


@pytest.mark.parametrize("hook", ["route", "on_step", "on_tick", "on_leg_end", "on_finish"])
def test_a_hook_does_not_end_the_process(hook: str) -> None:
    class Leaves(System):
        def route(self, waiting: Any, cluster: ClusterView) -> list[Assignment]:
            return [Assignment(r.id, (Leg("A", 4), Leg("B"))) for r in waiting]

    Leaves.tick_interval = 1.5 if hook == "on_tick" else None
    setattr(Leaves, hook, lambda *asked: sys.exit("enough"))
    with pytest.raises(JaxinferError, match=rf"^Leaves\.{hook} raises SystemExit: enough \("):
        serve(Leaves(), [pool("A"), pool("B")], [(6, 3)])


def test_a_hook_may_not_even_return_an_empty_list() -> None:
    class Answers(Planned):
        def on_finish(self, request: RequestView, cluster: ClusterView) -> Any:
            return []

    with pytest.raises(JaxinferError, match=r"Answers\.on_finish returns \[\], must return no"):
        serve(Answers({"r0": (Leg("A"),)}), [pool("A")], [(4, 1)])


def test_who_only_hears_does_without_the_rows_of_decodes() -> None:
    assert not Hears().needs_decode_rows


@pytest.mark.parametrize(("hook", "times"), [("on_leg_end", [2]), ("on_finish", [5]), ("none", [])])
def test_each_hook_alone(hook: str, times: list[float]) -> None:
    heard: list[float] = []

    class One(System):
        def route(self, waiting: Any, cluster: ClusterView) -> list[Assignment]:
            return [Assignment(r.id, (Leg("A", 6), Leg("B"))) for r in waiting]

    setattr(One, hook, lambda self, request, *rest: heard.append(rest[-1].now))
    serve(One(), [pool("A"), pool("B")], [(6, 3)])
    assert heard == times


@pytest.mark.parametrize("hook", ["on_step", "on_leg_end", "on_finish", "on_tick"])
def test_hooks_that_a_system_does_not_define_are_not_called(hook: str) -> None:
    class One(System):
        pass

    setattr(One, hook, lambda *asked: None)
    hooks = Hooks(One())
    called = {"on_step": hooks.steps, "on_leg_end": hooks.leg_ends, "on_finish": hooks.finishes}
    assert called == {name: name == hook for name in called}
