"""Where a mesh has a mixture's experts and tokens while they are multiplied; needs no JAX."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxinfer.models.layouts import Layout, named, table_in_use

# Room for rows that one device sends to another, in standard deviations above the mean. Of 64 pairs
# of devices, one exceeds it in fewer than 1 of 400 steps.
SPARE = 4.0


@dataclass(frozen=True)
class ExpertPlaces:
    """Axes of a mesh, grouped by what they cut.

    Attributes:
        weights: axes that cut E, D and F.
        tokens: axes that cut the tokens before and after.
        exchanged: axes over which tokens are sent to their experts and results come back: all of
            E's or none. If none, each device computes its experts' part of all tokens, and results
            are summed.
    """

    weights: dict[str, tuple[str, ...]]
    tokens: tuple[str, ...]
    exchanged: tuple[str, ...]

    @property
    def summed(self) -> tuple[str, ...]:
        """Axes over which results are summed."""
        experts = () if self.exchanged else self.weights["E"]
        return (*experts, *self.weights["F"])


def expert_places(layout: Layout, axes: Sequence[str]) -> ExpertPlaces:
    """Return where a layout puts experts and their tokens on a mesh with these axes.

    The weights' places are those of the first layer's gate; weights that a layout places
    differently are moved there. Tokens are exchanged if ``ffn_inputs`` are cut over all axes that
    cut experts.
    """
    table = table_in_use("layers.0.mlp.gate_EDF", layout, axes)
    weights = {letter: named(table.get(letter, ()), axes) for letter in "EDF"}
    tokens = named(layout.activations.get("ffn_inputs", {}).get("T", ()), axes)
    exchanged = weights["E"] if {*weights["E"]} <= {*tokens} else ()
    taken = {axis for each in weights.values() for axis in each} - {*exchanged}
    return ExpertPlaces(weights, tuple(axis for axis in tokens if axis not in taken), exchanged)


def slots(tokens: float, devices: int, experts: int, per_token: int) -> float:
    """Return how many of a device's tokens it sends to each of ``devices`` in one round.

    A token is sent once to each device that holds one of its experts. A router without favourites
    sends each device its share of tokens, and rarely more than ``SPARE`` deviations above it. If a
    router has favourites, more rounds follow until all tokens are sent; together, the rounds have
    slots for less than twice all tokens.
    """
    elsewhere = experts - experts // devices
    share = 1 - math.comb(elsewhere, per_token) / math.comb(experts, per_token)
    mean = tokens * share
    return min(tokens, math.ceil(mean + SPARE * math.sqrt(mean * (1 - share))))
