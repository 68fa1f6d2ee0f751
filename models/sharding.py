"""Which axis of which parameter lies on which axis of the mesh: a table, replaceable as a whole.

A parameter's logical axes are the letters of its name's suffix: ``layers.0.attn.q_DNH`` has D, N
and H. KV pages always lie by their heads on the axis ``tp``.
"""

import math
import runpy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.errors import FAILURES, JaxinferError, raised
from jaxinfer.files.shipped import data_path, why_not
from jaxinfer.models.config import ModelConfig

HEADS_AXIS = "tp"


@dataclass(frozen=True)
class Rule:
    """Parameters whose path matches ``pattern`` (as file names do) lie on the mesh like this.

    Attributes:
        axes: logical axis -> mesh axis; the others are whole on every device.
    """

    pattern: str
    axes: Mapping[str, str]


# Megatron's layout (Shoeybi et al., 2019): two all-reduces per layer, embeddings on every device.
RULES: tuple[Rule, ...] = (Rule("*", {"N": HEADS_AXIS, "K": HEADS_AXIS, "F": HEADS_AXIS}),)


def load_rules(path: str | None) -> tuple[Rule, ...]:
    """``RULES`` of a Python file, or those above where there is none.

    Raises:
        JaxinferError: the file cannot be run, or has no such table.
    """
    if path is None:
        return RULES
    try:
        found = runpy.run_path(str(data_path(path))).get("RULES")
    except OSError as error:
        raise JaxinferError(f"sharding {path}: {why_not(path, error)}") from None
    except FAILURES as error:
        raise JaxinferError(f"sharding {path}: {raised(error)}") from error
    rules = tuple(found) if isinstance(found, tuple | list) else (None,)
    if not all(isinstance(rule, Rule) for rule in rules):
        raise JaxinferError(
            f"sharding {path}: must define RULES, a tuple of jaxinfer.models.sharding.Rule"
        )
    return rules


def shard(path: str, shape: Sequence[int], mesh: Mesh, rules: Sequence[Rule]) -> NamedSharding:
    """Shard by the first rule that matches; none leaves the parameter whole on every device.

    Raises:
        JaxinferError: a rule names an axis that the mesh has not, puts two axes of the
            parameter on one, or the devices do not divide the axis.
    """
    axes = next((rule.axes for rule in rules if fnmatchcase(path, rule.pattern)), {})
    letters = path.rpartition("_")[2]
    placed = [axes.get(letter) for letter in letters]
    for letter, size, axis in zip(letters, shape, placed, strict=True):
        if axis is None:
            continue
        if axis not in mesh.shape:
            raise JaxinferError(
                f"sharding rules put {path} on mesh axis {axis!r}, there is {list(mesh.shape)}"
            )
        if placed.count(axis) > 1:
            raise JaxinferError(f"sharding rules put two axes of {path} on mesh axis {axis!r}")
        if size % mesh.shape[axis]:
            raise JaxinferError(
                f"sharding rules cut axis {letter} of {path}, {size} long, "
                f"into {mesh.shape[axis]}, which does not divide it"
            )
    return NamedSharding(mesh, PartitionSpec(*placed))


def pages_sharding(mesh: Mesh) -> NamedSharding:
    """Shard keys [P, K, H, B] and values [P, K, B, H] by heads."""
    return NamedSharding(mesh, PartitionSpec(None, HEADS_AXIS))


def padded(config: ModelConfig, devices: int) -> ModelConfig:
    """The config with KV groups and feed-forward columns that divide by the devices.

    The added ones have zero weights on both sides, so that they add nothing to any sum.
    """
    groups = _up(config.num_key_value_heads, devices)
    queries = config.num_attention_heads // config.num_key_value_heads
    return replace(
        config,
        num_key_value_heads=groups,
        num_attention_heads=groups * queries,
        intermediate_size=_up(config.intermediate_size, devices),
    )


def _up(count: int, devices: int) -> int:
    return math.ceil(count / devices) * devices
