"""A rule in the place of simulations."""

import pytest
from plan_cases import Carries


@pytest.fixture
def carries(monkeypatch: pytest.MonkeyPatch) -> Carries:
    """A rule in the simulator's place; all clusters keep the targets of a lone request."""
    rule = Carries()
    monkeypatch.setattr("jaxinfer.simulate.capacity.load", rule)
    monkeypatch.setattr("jaxinfer.plan.evaluate.load", rule)
    monkeypatch.setattr("jaxinfer.simulate.capacity._met_alone", lambda *given: True)
    return rule
