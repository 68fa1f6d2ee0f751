"""A rule in the place of simulations."""

import pytest
from plan_cases import Carries

from jaxinfer.simulate.targets import Verdict


@pytest.fixture
def carries(monkeypatch: pytest.MonkeyPatch) -> Carries:
    """A rule in the simulator's place; all clusters keep the targets of a lone request."""
    rule = Carries()
    monkeypatch.setattr("jaxinfer.simulate.capacity.load", rule)
    monkeypatch.setattr("jaxinfer.plan.evaluate.load", rule)
    met = Verdict(True, 1, None, {})
    monkeypatch.setattr("jaxinfer.plan.evaluate.alone", lambda *given: met)
    return rule
