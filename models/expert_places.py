"""Places of a mixture's experts and tokens on a mesh while they are multiplied; needs no JAX."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxinfer.models.layouts import Layout, named, table_in_use

# Standard deviations above what chance sends from one device to another: of 64 pairs, one has more
# in fewer than 1 of 400 steps.
SPARE = 4.0


@dataclass(frozen=True)
class ExpertPlaces:
    """Axes of a mesh by what they cut.

    Attributes:
        weights: for each of E, D and F.
        tokens: of each device before and after.
        exchanged: axes over which tokens go to their experts and results come back, all of E's or
            none; else each device computes its experts' part of all tokens, and sums join them.
    """

    weights: dict[str, tuple[str, ...]]
    tokens: tuple[str, ...]
    exchanged: tuple[str, ...]

    @property
    def summed(self) -> tuple[str, ...]:
        """Axes over which results are added up."""
        experts = () if self.exchanged else self.weights["E"]
        return (*experts, *self.weights["F"])


def expert_places(layout: Layout, axes: Sequence[str]) -> ExpertPlaces:
    """The places of a layout on a mesh with these axes.

    Weights are those of the first layer's gate: others that a layout puts elsewhere are moved
    there. Tokens are exchanged where ``ffn_inputs`` are cut over all axes that experts are.
    """
    table = table_in_use("layers.0.mlp.gate_EDF", layout, axes)
    weights = {letter: named(table.get(letter, ()), axes) for letter in "EDF"}
    tokens = named(layout.activations.get("ffn_inputs", {}).get("T", ()), axes)
    exchanged = weights["E"] if {*weights["E"]} <= {*tokens} else ()
    taken = {axis for each in weights.values() for axis in each} - {*exchanged}
    return ExpertPlaces(weights, tuple(axis for axis in tokens if axis not in taken), exchanged)


def slots(tokens: float, devices: int, experts: int, per_token: int) -> float:
    """Tokens, of those on a device, that it sends to each of ``devices`` in one round.

    A token goes once to each device that holds one of its experts. Routers without a favourite
    send tokens x share there, and seldom more than ``SPARE`` deviations above. For others, rounds
    follow until all are sent, together with slots for less than twice all tokens.
    """
    elsewhere = experts - experts // devices
    share = 1 - math.comb(elsewhere, per_token) / math.comb(experts, per_token)
    mean = tokens * share
    return min(tokens, math.ceil(mean + SPARE * math.sqrt(mean * (1 - share))))
