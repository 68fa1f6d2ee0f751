"""Planners by name: jaxinfer's, and the user's own."""

from collections.abc import Mapping
from contextlib import suppress
from inspect import signature
from typing import Any

from jaxinfer.lab.plan.candidate import Planner
from jaxinfer.options.by_name import make_by_name

PLANNERS = {
    "colocated": "jaxinfer.lab.plan.planners.colocated:Colocated",
    "pd_ratio": "jaxinfer.lab.plan.planners.pd_ratio:PDRatio",
    "any_system": "jaxinfer.lab.plan.planners.any_system:AnySystem",
    "splitwise": "jaxinfer.papers.splitwise.planner:SplitwisePools",
    "hexgen2": "jaxinfer.papers.hexgen2.planner:HexGen2Planner",
    "hexgen3": "jaxinfer.papers.hexgen3.planner:HexGen3Planner",
    "hetis": "jaxinfer.papers.hetis.planner:HetisPlanner",
    "aladdin": "jaxinfer.papers.aladdin.planner:AladdinPlanner",
    "distserve_high": "jaxinfer.papers.distserve.planner:DistServeHigh",
    "distserve_low": "jaxinfer.papers.distserve.planner:DistServeLow",
}


def make_planner(config: Mapping[str, Any]) -> Planner:
    """Make a new planner for one search.

    Args:
        config: the planner's ``name``, or ``my_module:MyPlanner``, and its options.

    Raises:
        JaxinferError: the planner is unknown, or the options do not fit it.
    """
    made: Planner = make_by_name("planner", config, PLANNERS, _refusal)
    return made


def _refusal(found: Any) -> str | None:
    plan = getattr(found, "plan", None)
    if isinstance(found, type) and callable(plan):
        with suppress(TypeError):
            signature(plan).bind("self", "problem", "search")
            return None
    return "is no class with a method plan(problem, search)"
