"""Closed forms of a mixture of experts, as ``models/grouped_experts.py`` computes it.

This file needs no JAX.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from jaxinfer.hardware.catalogue import ModelShape
from jaxinfer.models.expert_places import expert_places, slots
from jaxinfer.sharding.flow_rules import Activation, Cuts, FlowRules


@dataclass(frozen=True)
class ExpertExchange:
    """Tokens that are sent to their experts and come back, in one round.

    Attributes:
        devices: number of devices that send to each other.
        pieces: number of pieces of all tokens before the exchange.
    """

    devices: int
    pieces: int
    experts: int
    per_token: int

    def slots(self, tokens: float) -> float:
        """Return the tokens that each device sends to each other one, if all devices have
        ``tokens``.
        """
        return slots(tokens / self.pieces, self.devices, self.experts, self.per_token)


def experts(
    flow: FlowRules, model: ModelShape, y: Activation, path: Mapping[str, str], residual: Cuts
) -> ExpertExchange | None:
    """Add a mixture's flow to a layer's; return the exchange."""
    E, X = model.num_experts, model.num_experts_per_tok
    places = expert_places(flow.layout, flow.axes)
    tokens, rows = flow.cuts("T", {"T": places.tokens}), flow.cuts("D", places.weights)
    over = flow.cuts("E", {"E": places.exchanged}).get("E", ())
    flow.move(flow.product(y, path["router_DE"], "TE", "router", None), tokens)
    x, exchange = flow.move(y, {**tokens, **rows}), None
    count, letters = flow.local("T", tokens), "T"
    if over:
        exchange = ExpertExchange(flow.ways(over), flow.ways(tokens["T"]), E, X)
        x = replace(x, cuts=_without(over, x.cuts))
        count, letters = exchange.devices * exchange.slots(flow.sizes["T"]), "TJ"
        flow.add("all-gather", over, flow.local("T", x.cuts) * 2 * X, "shares", "TX")
    sent = count * flow.local("D", rows)
    flow.add("all-to-all", over, sent, "sent", "TJD")
    for name in ("gate_EDF", "up_EDF"):
        up = flow.product(x, path[name], "TEF", name, None)
        numbers = count * X * flow.local("F", up.cuts)
        flow.add("all-reduce", rows.get("D", ()), numbers, name, f"{letters}XF")
    flow.product(Activation("experts", "TEF", up.cuts), path["down_EFD"], "TD", "ffn", None)
    flow.add("all-to-all", over, sent, "come back", "TJD")
    summed = flow.cuts("E", {"E": places.summed}).get("E", ())
    _add_up(flow, Activation("ffn", "TD", {**tokens, **rows}), summed, residual)
    return exchange


def _add_up(flow: FlowRules, out: Activation, summed: tuple[str, ...], residual: Cuts) -> None:
    """Add one sum over all axes, scattered if the residual stream is cut over all of them."""
    if {*summed} <= {axis for axes in residual.values() for axis in axes}:
        flow.move(replace(out, partial=(summed,)), residual)
    else:
        flow.record("all-reduce", summed, out.letters, out.cuts, out.what)
        flow.move(out, residual)


def _without(gone: tuple[str, ...], cuts: Cuts) -> Cuts:
    left = {k: tuple(axis for axis in axes if axis not in gone) for k, axes in cuts.items()}
    return {k: axes for k, axes in left.items() if axes}
