"""Random workloads through the loop on the verifying world: tokens, pages and limits hold."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scenarios import HUNT, Chaos, Follow, Scenario, examples, scenarios, spare_the_oldest

from jaxinfer.serving.policies import Policies

CAREFUL = Policies(victim=spare_the_oldest)


@examples(150)
@given(scenarios(max_instances=1, max_legs=1))
def test_one_instance(scenario: Scenario) -> None:
    outcome = scenario.run(Follow(scenario.by_id), CAREFUL).verify()
    assert not outcome.world.transfers


@examples(300)
@given(scenarios())
def test_legs_over_instances(scenario: Scenario) -> None:
    outcome = scenario.run(Follow(scenario.by_id), CAREFUL).verify()
    assert not any(r.finish_reason == "error" for r in outcome.finished.values())


@examples(250)
@given(scenarios(), st.integers(0, 2**16), st.integers(1, 30))
def test_systems_may_do_anything_at_any_time(scenario: Scenario, seed: int, actions: int) -> None:
    outcome = scenario.run(Chaos(scenario.by_id, seed, actions)).verify()
    assert not any(r.finish_reason == "error" for r in outcome.finished.values())


@pytest.mark.slow
@examples(3000)
@given(scenarios(max_requests=14), st.integers(0, 2**16), st.integers(0, 60))
def test_longer_runs(scenario: Scenario, seed: int, actions: int) -> None:
    scenario.run(Chaos(scenario.by_id, seed, actions)).verify()
