"""A simulated world of given step times and links."""

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any, cast

from jaxinfer.serving.request_state import RequestState
from jaxinfer.simulate.cluster import ModelledCluster
from jaxinfer.simulate.world import SimulatedWorld


def modelled_world(
    costs: Mapping[str, Any],
    segments: Mapping[str, int],
    devices: Mapping[str, Any],
    lanes: Mapping[Any, Any],
    capacities: Mapping[Any, float],
    requests: Iterable[RequestState],
    start: float = 0.0,
    slice_lanes: Mapping[str, Any] | None = None,
    visits: Mapping[str, Any] | None = None,
    joint: Any = None,
) -> SimulatedWorld:
    """The world of instances that have nothing but times."""
    instances = {
        name: SimpleNamespace(
            cost=cost,
            segments=segments[name],
            devices=devices[name],
            visits=(visits or {}).get(name, ()),
        )
        for name, cost in costs.items()
    }
    cluster = SimpleNamespace(
        instances=instances,
        lanes=lanes,
        capacities=capacities,
        slice_lanes=slice_lanes or {},
        joint=joint,
    )
    return SimulatedWorld(cast(ModelledCluster, cluster), requests, start)
