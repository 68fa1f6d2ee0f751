"""Instances of equal stages on nodes of equal GPUs, as parts of run files."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from jaxinfer.lab.plan.problem import merge

Part = Mapping[str, Any]


@dataclass(frozen=True)
class InstanceShape:
    """The shape of one instance: its stages, and how many of them each node has.

    Attributes:
        tp: number of GPUs of a stage, all in one node.
        stages: number of stages on each of the instance's nodes.
    """

    tp: int
    stages: tuple[int, ...]

    @property
    def pp(self) -> int:
        """Total number of stages."""
        return sum(self.stages)

    @property
    def gpus(self) -> int:
        """Total number of GPUs."""
        return self.tp * self.pp

    @property
    def by_node(self) -> list[int]:
        """Number of GPUs on each of the instance's nodes."""
        return [self.tp * count for count in self.stages]


def packed(tp: int, pp: int, gpus_per_node: int) -> InstanceShape:
    """Return the shape that uses the fewest nodes."""
    full, rest = divmod(pp, gpus_per_node // tp)
    return InstanceShape(tp, (gpus_per_node // tp,) * full + ((rest,) if rest else ()))


def num_nodes(pieces: Iterable[int], gpus_per_node: int) -> int:
    """Return how many nodes pieces need, each on only one node; the largest are placed first."""
    left: list[int] = []
    for piece in sorted(pieces, reverse=True):
        fits = next((number for number, free in enumerate(left) if free >= piece), None)
        if fits is None:
            left.append(gpus_per_node - piece)
        else:
            left[fits] -= piece
    return len(left)


def groups_of(name: str, shape: InstanceShape) -> list[str]:
    """Return the names of an instance's groups, one per node; replicas append their numbers."""
    return [f"{name}_{node}_" for node in range(len(shape.stages))]


def instance_part(
    name: str, shape: InstanceShape, kind: str, layers: int, costs: Part, replicas: int = 1
) -> Part:
    """Return the groups, stages and costs of an instance and its replicas.

    Args:
        layers: number of the model's layers, which all stages share equally.
        costs: costs of the instance's groups.
    """
    names = groups_of(name, shape)
    return {
        "groups": {
            group: {
                "kind": kind,
                "devices": gpus,
                "tensor_parallel_size": shape.tp,
                "replicas": replicas,
            }
            for group, gpus in zip(names, shape.by_node, strict=True)
        },
        "instances": {
            name: {
                "stages": [
                    {"group": group, "layers": layers // shape.pp}
                    for group, count in zip(names, shape.stages, strict=True)
                    for _ in range(count)
                ],
                "replicas": replicas,
            }
        },
        "simulate": {"groups": {group: dict(costs) for group in names} if costs else {}},
    }


def chain(groups: Sequence[str], gb_s: float) -> list[Part]:
    """Return links from each group to the next."""
    return [link(ends, gb_s) for ends in pairwise(groups)]


def link(ends: Iterable[str], gb_s: float) -> Part:
    """Return the link between two groups and all their replicas."""
    return {"between": list(ends), "gb_s": gb_s}


def joined(parts: Sequence[Part], links: Sequence[Part]) -> Part:
    """Join parts of a run file into one part."""
    found: dict[str, Any] = {"links": list(links)}
    for part in parts:
        found = merge(found, part)
    return found
