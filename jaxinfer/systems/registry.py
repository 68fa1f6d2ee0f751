"""Systems by name: jaxinfer's, and the user's own."""

from collections.abc import Collection, Mapping
from typing import Any

from jaxinfer.errors import JaxinferError
from jaxinfer.options.by_name import make_by_name
from jaxinfer.options.validation import shown
from jaxinfer.serving.system import System

SYSTEMS = {
    "single": "jaxinfer.systems.single:Single",
    "cronus": "jaxinfer.papers.cronus.system:Cronus",
    "data_parallel": "jaxinfer.systems.data_parallel:DataParallel",
    "takeover": "jaxinfer.papers.takeover.system:Takeover",
    "least_loaded": "jaxinfer.systems.least_loaded:LeastLoaded",
    "prefix_aware": "jaxinfer.systems.prefix_aware:PrefixAware",
    "session_affinity": "jaxinfer.systems.session_affinity:SessionAffinity",
    "disaggregated": "jaxinfer.systems.disaggregated:Disaggregated",
    "distserve": "jaxinfer.papers.distserve.system:DistServe",
    "splitwise": "jaxinfer.papers.splitwise.system:Splitwise",
    "tetriinfer": "jaxinfer.papers.tetriinfer.system:TetriInfer",
    "hexgen2": "jaxinfer.papers.hexgen2.system:HexGen2",
    "hetis": "jaxinfer.papers.hetis.system:Hetis",
    "aladdin": "jaxinfer.papers.aladdin.system:Aladdin",
    "pipeline_parallel": "jaxinfer.systems.single:PipelineParallel",
}


def make_system(config: Mapping[str, Any], instances: Collection[str]) -> System:
    """Make a new system for one run.

    Args:
        config: its ``name``, or ``my_module:MySystem``, and its options.
        instances: names of the instances.

    Raises:
        JaxinferError: the system is unknown, or its options or instances do not fit it.
    """

    def check(system: System) -> None:
        system.check(instances)
        _check_attributes(system, instances)

    return make_by_name("system", config, SYSTEMS, _refusal, check)


def _refusal(found: Any) -> str | None:
    if isinstance(found, type) and issubclass(found, System):
        return None
    return "is no jaxinfer.serving.system.System"


def _check_attributes(system: System, instances: Collection[str]) -> None:
    """Raise JaxinferError for attributes that the loop cannot work with."""
    kind = type(system)
    if getattr(system.route, "__func__", None) is System.route:
        raise JaxinferError(f"{kind.__name__} has no method route(waiting, cluster)")
    interval = system.tick_interval
    if interval is not None and not (isinstance(interval, int | float) and interval > 0):
        raise JaxinferError(f"tick_interval is {shown(interval)}, must be seconds above 0, or None")
    pairs = system.routes(instances)
    if not isinstance(pairs, Collection):
        raise JaxinferError(f"routes returns {shown(pairs)}, must be pairs of instances")
    names = {*instances}
    for pair in () if kind.routes is System.routes else pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not names.issuperset(pair):
            raise JaxinferError(
                f"routes returns {shown(pair)} among its pairs, must be two of the instances: "
                f"{', '.join(instances)}"
            )
