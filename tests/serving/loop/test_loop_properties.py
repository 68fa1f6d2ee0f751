"""Random workloads through the loop on the verifying world: tokens, pages and limits hold."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples
from scenarios import (
    Chaos,
    Follow,
    Scenario,
    SparesTheOldest,
    Survivor,
    scenarios,
)


@examples(100)
@given(scenarios(max_instances=1, max_legs=1))
def test_one_instance(scenario: Scenario) -> None:
    run = scenario.run(Follow(scenario.by_id), instance_type=SparesTheOldest)
    assert not run.verify().world.transfers


@examples(200)
@given(scenarios())
def test_legs_over_instances(scenario: Scenario) -> None:
    run = scenario.run(Follow(scenario.by_id), instance_type=SparesTheOldest)
    assert not any(r.error for r in run.verify().finished.values())


@examples(200)
@given(scenarios(), st.integers(0, 2**16), st.integers(1, 30))
def test_systems_may_do_anything_at_any_time(scenario: Scenario, seed: int, actions: int) -> None:
    outcome = scenario.run(Chaos(scenario.by_id, seed, actions, scenario.caching)).verify()
    assert not any(r.error for r in outcome.finished.values())


@st.composite
def losses(draw: st.DrawFn) -> Scenario:
    scenario = draw(scenarios())
    names = [name for name, *_ in scenario.instances]
    lost = draw(st.lists(st.sampled_from(names), unique=True, max_size=len(names)))
    times = {name: float(draw(st.integers(0, 60))) for name in lost}
    return replace(scenario, timing=replace(scenario.timing, lost=times))


@examples(200)
@given(losses())
def test_what_a_lost_instance_had_goes_on_elsewhere(scenario: Scenario) -> None:
    outcome = scenario.run(Survivor(scenario.by_id)).verify()
    errors = [r.error for r in outcome.finished.values() if r.error]
    assert not errors or not outcome.loop.assignments.instances
    assert all("was lost" in error for error in errors)


@examples(150)
@given(losses(), st.integers(0, 2**16), st.integers(0, 20))
def test_systems_that_know_nothing_of_losses_come_to_an_end(
    scenario: Scenario, seed: int, actions: int
) -> None:
    outcome = scenario.run(Chaos(scenario.by_id, seed, actions, scenario.caching)).verify()
    for request in outcome.finished.values():
        assert request.error is None or "was lost" in request.error
        assert request.error is None or outcome.loop.assignments.losses.lost


@st.composite
def outages(draw: st.DrawFn, all_return: bool = False) -> Scenario:
    """Losses of each instance, up to three, and returns in between, or at last as well."""
    scenario = draw(scenarios())
    lost, fail = {}, []
    for name, *_ in scenario.instances:
        times = draw(st.lists(st.integers(0, 60), unique=True, max_size=6).map(sorted))
        if all_return:
            times = times[: len(times) // 2 * 2]
        elif times and draw(st.booleans()):
            fail.append(name)
        if times:
            lost[name] = [float(time) for time in times]
    timing = replace(scenario.timing, lost=lost, fail_to_start=fail)
    return replace(scenario, timing=timing)


@examples(100)
@given(outages(all_return=True))
def test_who_can_go_nowhere_else_waits_for_the_return(scenario: Scenario) -> None:
    """A script may name lost instances as if they were there: its requests wait, and none fails."""
    outcome = scenario.run(Follow(scenario.by_id)).verify()
    assert not any(request.error for request in outcome.finished.values())


@examples(100)
@given(outages(), st.integers(0, 2**16), st.integers(0, 20))
def test_losses_and_returns_at_any_time(scenario: Scenario, seed: int, actions: int) -> None:
    def system() -> Chaos:
        return Chaos(scenario.by_id, seed, actions, scenario.caching)

    outcome = scenario.run(system()).verify()
    lost = outcome.loop.assignments.losses.lost.keys() - outcome.loop.assignments.losses.returning
    for request in outcome.finished.values():
        assert request.error is None or any(f"{name!r} was lost" in request.error for name in lost)
    again = scenario.run(system()).verify()
    assert again.ended == outcome.ended
    assert [(s.start, s.end, s.batch.instance) for s in again.world.steps] == [
        (s.start, s.end, s.batch.instance) for s in outcome.world.steps
    ]


@examples(100)
@given(outages(), st.integers(0, 2**16), st.integers(0, 20))
def test_the_next_run_has_all_pages_that_losses_have_left(
    scenario: Scenario, seed: int, actions: int
) -> None:
    """The lost instances' as well, and what the others' prefix caches keep."""
    chaos = Chaos(scenario.by_id, seed, actions, scenario.caching)
    before = scenario.run(chaos).verify()
    quiet = replace(scenario, timing=replace(scenario.timing, lost={}))
    outcome = quiet.run(Follow(scenario.by_id), after=before).verify()
    assert not any(request.error for request in outcome.finished.values())


@examples(60)
@given(scenarios(max_instances=2), st.data())
def test_what_never_fits_is_refused_and_the_rest_completes(
    scenario: Scenario, data: st.DataObject
) -> None:
    too_long = data.draw(st.sampled_from(range(len(scenario.scripts))))
    name, pages, page_size, *_ = scenario.instances[0]
    scenario.scripts[too_long] = scenario.too_long_for(name, too_long)
    outcome = scenario.run(Follow(scenario.by_id)).verify()
    for request in outcome.finished.values():
        if request.id != f"r{too_long}":
            assert request.error is None
            continue
        assert request.finish_reason == "error"
        assert request.error is not None
        needed = -(-request.peak_tokens // page_size)
        for part in (repr(request.id), f"{needed} pages", repr(name), f"has {pages}"):
            assert part in request.error
        assert not request.output_token_ids


@pytest.mark.slow
@examples(1000)
@given(scenarios(max_requests=14), st.integers(0, 2**16), st.integers(0, 60))
def test_longer_runs(scenario: Scenario, seed: int, actions: int) -> None:
    scenario.run(Chaos(scenario.by_id, seed, actions, scenario.caching)).verify()
