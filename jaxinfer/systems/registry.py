"""Systems by name: those that come with jaxinfer, and a user's own."""

from collections.abc import Collection, Mapping
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
from jaxinfer.serving.system import System

SYSTEMS = {
    "single": "jaxinfer.systems.single:Single",
    "cronus": "jaxinfer.systems.cronus:Cronus",
    "data_parallel": "jaxinfer.systems.data_parallel:DataParallel",
    "least_loaded": "jaxinfer.systems.least_loaded:LeastLoaded",
    "disaggregated": "jaxinfer.systems.disaggregated:Disaggregated",
    "distserve": "jaxinfer.systems.distserve:DistServe",
    "splitwise": "jaxinfer.systems.splitwise:Splitwise",
    "tetriinfer": "jaxinfer.systems.tetriinfer:TetriInfer",
    "hexgen2": "jaxinfer.systems.hexgen2:HexGen2",
    "pipeline_parallel": "jaxinfer.systems.pipeline_parallel:PipelineParallel",
}


def make_system(config: Mapping[str, Any], instances: Collection[str]) -> System:
    """A new system for one run.

    Args:
        config: its ``name``, or ``my_module:MySystem``, and its options.
        instances: the names of those there are.

    Raises:
        JaxinferError: there is no such system, or its options or instances do not fit it.
    """
    options = dict(config)
    name = options.pop("name", None)
    if not isinstance(name, str):
        given = "is missing" if name is None else f"is {shown(name)}"
        raise JaxinferError(
            f"system.name {given}, must be one of {', '.join(SYSTEMS)}, or my_module:MySystem"
        )
    kind = _find(name)
    try:
        system = kind(kind.Options.model_validate(options))
        system.check(instances)
        _check_attributes(system, instances)
    except OptionError as error:
        raise within("system", error) from None
    except JaxinferError as error:
        raise JaxinferError(f"system {name}: {error}") from None
    except FAILURES as error:
        if name in SYSTEMS:
            raise
        raise JaxinferError(f"system {name}: making it raises {raised(error)}") from error
    return system


def _find(name: str) -> type[System]:
    target = SYSTEMS.get(name, name)
    if ":" not in target:
        raise JaxinferError(
            f"system {name!r}: {did_you_mean(name, SYSTEMS)}; or my_module:MySystem of your own"
        )
    try:
        found = import_own(target)
    except JaxinferError as error:
        raise JaxinferError(f"system {error}") from error
    attribute = target.partition(":")[2]
    if not (isinstance(found, type) and issubclass(found, System)):
        raise JaxinferError(f"system {name!r}: {attribute} is no jaxinfer.serving.system.System")
    if not (isinstance(found.Options, type) and issubclass(found.Options, Options)):
        raise JaxinferError(
            f"system {name!r}: {attribute}.Options is {found.Options!r}, must be a subclass of "
            "jaxinfer.config.validation.Options"
        )
    return found


def _check_attributes(system: System, instances: Collection[str]) -> None:
    """Raise JaxinferError for what the loop could not work with."""
    kind = type(system)
    if getattr(system.route, "__func__", None) is System.route:
        raise JaxinferError(f"{kind.__name__} has no method route(waiting, cluster)")
    interval = system.tick_interval
    if interval is not None and not (isinstance(interval, int | float) and interval > 0):
        raise JaxinferError(f"tick_interval is {shown(interval)}, must be seconds above 0, or None")
    pairs = system.routes(instances)
    if not isinstance(pairs, Collection):
        raise JaxinferError(f"routes returns {shown(pairs)}, must be pairs of instances")
    for pair in () if kind.routes is System.routes else pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not {*pair} <= {*instances}:
            raise JaxinferError(
                f"routes returns {shown(pair)} among its pairs, must be two of the instances: "
                f"{', '.join(instances)}"
            )
