"""Planners by name: those that come with jaxinfer, and a user's own."""

from collections.abc import Mapping
from typing import Any

from jaxinfer.config.validation import (
    OptionError,
    Options,
    did_you_mean,
    import_own,
    shown,
    within,
)
from jaxinfer.errors import FAILURES, JaxinferError, raised
from jaxinfer.plan.candidate import Planner

PLANNERS = {
    "colocated": "jaxinfer.plan.planners.colocated:Colocated",
    "pd_ratio": "jaxinfer.plan.planners.pd_ratio:PDRatio",
    "any_system": "jaxinfer.plan.planners.any_system:AnySystem",
    "splitwise": "jaxinfer.plan.planners.splitwise:SplitwisePools",
    "hexgen2": "jaxinfer.plan.planners.hexgen2:HexGen2",
    "distserve_high": "jaxinfer.plan.planners.distserve:DistServeHigh",
    "distserve_low": "jaxinfer.plan.planners.distserve:DistServeLow",
}


def make_planner(config: Mapping[str, Any]) -> Planner:
    """A new planner for one search.

    Args:
        config: its ``name``, or ``my_module:MyPlanner``, and its options.

    Raises:
        JaxinferError: there is no such planner, or its options do not fit it.
    """
    options = dict(config)
    name = options.pop("name", None)
    if not isinstance(name, str):
        given = "is missing" if name is None else f"is {shown(name)}"
        raise JaxinferError(
            f"planner.name {given}, must be one of {', '.join(PLANNERS)}, or my_module:MyPlanner"
        )
    kind = _find(name)
    try:
        planner: Planner = kind(kind.Options.model_validate(options))
    except OptionError as error:
        raise within("planner", error) from None
    except JaxinferError as error:
        raise JaxinferError(f"planner {name}: {error}") from None
    except FAILURES as error:
        if name in PLANNERS:
            raise
        raise JaxinferError(f"planner {name}: making it raises {raised(error)}") from error
    return planner


def _find(name: str) -> type[Planner]:
    target = PLANNERS.get(name, name)
    if ":" not in target:
        raise JaxinferError(
            f"planner {name!r}: {did_you_mean(name, PLANNERS)}; or my_module:MyPlanner of your own"
        )
    try:
        found = import_own(target)
    except JaxinferError as error:
        raise JaxinferError(f"planner {error}") from error
    options = getattr(found, "Options", None)
    if not (isinstance(found, type) and callable(getattr(found, "plan", None))):
        raise JaxinferError(f"planner {name!r}: is no class with a method plan(search)")
    if not (isinstance(options, type) and issubclass(options, Options)):
        raise JaxinferError(
            f"planner {name!r}: Options is {options!r}, must be a subclass of "
            "jaxinfer.config.validation.Options"
        )
    return found
