"""Closed forms of a layer and of the head by ``flow_rules``: data moved and products computed.

This file needs no JAX.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from jaxinfer.hardware.catalogue import ModelShape
from jaxinfer.models.layouts import Layout
from jaxinfer.sharding.collectives import Collective
from jaxinfer.sharding.expert_flow import ExpertExchange, experts
from jaxinfer.sharding.flow_rules import (
    Activation,
    Cuts,
    FlowRules,
    ProductShare,
    letters_name,
    otherwise,
)
from jaxinfer.sharding.shapes import Sizes, layer_parameters


@dataclass(frozen=True)
class AttentionShare:
    """A device's part of attention: query tokens and heads, KV heads, and share of
    each sequence.
    """

    tokens: float
    heads: float
    kv_heads: float
    entries: float = 1.0


@dataclass(frozen=True)
class LayerFlow:
    """The flow of one layer, or of the head.

    Attributes:
        exchange: exchange of tokens between devices with experts; its collectives have the letter
            J.
    """

    collectives: list[Collective]
    products: list[ProductShare]
    attention: AttentionShare | None = None
    exchange: ExpertExchange | None = None


def layer_flow(model: ModelShape, layout: Layout, mesh: Sizes, tokens: float) -> LayerFlow:
    """Return the flow of one decoder layer: all that each device moves and computes.

    Args:
        model: model whose heads and columns divide, see ``shapes.padded``.
        tokens: number of tokens in the step.
    """
    flow = FlowRules(model, layout, mesh, tokens)
    path = {letters_name(each): each for each in layer_parameters(model)}
    residual = flow.named_cuts("residual") or {}
    y = flow.normed("attention_inputs", residual, model.gated)
    heads, kv = flow.named_cuts("heads"), flow.named_cuts("kv")
    made = flow.named_cuts("queries", "heads")
    q = flow.product(y, path["q_DNH"], "TNH", "q", made)
    q = flow.move(flow.move(q, otherwise(made, q.cuts)), otherwise(heads, q.cuts))
    made = flow.named_cuts("new_kv", "kv")
    for each in "kv":
        new = flow.product(y, path[f"{each}_DKH"], "TKH", each, made)
        new = flow.move(flow.move(new, otherwise(made, new.cuts)), otherwise(kv, new.cuts))
        flow.move(new, flow.cuts("TK", {"T": layout.kv.get("S", ()), **layout.kv}))
    own, parts = (flow.cuts(k, layout.kv).get(k, ()) for k in "KC")
    rows = (heads or {}).get("T", ())
    seen: Cuts = {k: axes for k, axes in {"T": rows, "N": own}.items() if axes}
    flow.move(q, seen)
    attention = AttentionShare(
        flow.local("T", seen),
        flow.local("N", seen),
        flow.local("K", {"K": own}),
        1 / flow.ways(parts),
    )
    out = Activation("out", "TNH", seen)
    out = _put_together(flow, out, parts) if parts else flow.move(out, otherwise(heads, seen))
    out = flow.move(out, otherwise(flow.named_cuts("attention_outputs"), out.cuts))
    flow.move(flow.product(out, path["o_NHD"], "TD", "attention", residual), residual)
    y = flow.normed("ffn_inputs", residual, model.gated)
    if model.num_experts:
        exchange = experts(flow, model, y, path, residual)
        return LayerFlow(flow.collectives, flow.products, attention, exchange)
    _ffn(flow, y, path, model.gated, residual)
    return LayerFlow(flow.collectives, flow.products, attention)


def _put_together(flow: FlowRules, out: Activation, parts: tuple[str, ...]) -> Activation:
    """Combine softmaxes over parts of a sequence: their maxima, sums and values."""
    for what in ("most", "sum"):
        flow.record("all-reduce", parts, "TN", out.cuts, what, asked=True)
    wanted = (flow.named_cuts("attention_outputs") or {}).get("N", ())
    scattered = tuple(axis for axis in parts if axis in wanted)
    left = tuple(axis for axis in parts if axis not in wanted)
    flow.record("reduce-scatter", scattered, out.letters, out.cuts, out.what, asked=True)
    heads = (*out.cuts.get("N", ()), *scattered)
    out = replace(out, cuts={**out.cuts, "N": heads} if heads else out.cuts)
    flow.record("all-reduce", left, out.letters, out.cuts, out.what, asked=True)
    return out


def _ffn(
    flow: FlowRules, y: Activation, path: Mapping[str, str], gated: bool, residual: Cuts
) -> None:
    to = flow.named_cuts("ffn")
    for name in ("gate_DF", "up_DF") if gated else ("up_DF",):
        up = flow.product(y, path[name], "TF", letters_name(name), to)
        up = flow.move(up, otherwise(to, up.cuts))
    up = flow.move(replace(up, what="ffn"), otherwise(flow.named_cuts("ffn_outputs"), up.cuts))
    flow.move(flow.product(up, path["down_FD"], "TD", "ffn", residual), residual)


def head_flow(model: ModelShape, layout: Layout, mesh: Sizes, rows: float) -> LayerFlow:
    """Return the flow of the head for the sampled rows."""
    flow = FlowRules(model, layout, mesh, rows)
    residual = flow.named_cuts("residual") or {}
    x = flow.move(flow.normed("head", residual, model.gated), {})
    path = "embed_VD" if model.tie_word_embeddings else "head_VD"
    table = flow.layout.activations.get("logits")
    to = (
        None
        if table is None
        else {{"S": "T"}.get(k, k): axes for k, axes in flow.cuts("SV", table).items()}
    )
    logits = flow.product(x, path, "TV", "logits", to)
    flow.move(logits, otherwise(to, logits.cuts))
    return LayerFlow(flow.collectives, flow.products)
