"""Converts published tables to a model's operators, per GPU and layer, in microseconds.

In the tables, times are in milliseconds, and sizes of all-reduces are in elements. Small operators
on vectors are in no table; each takes one launch plus its bytes at the card's bandwidth.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from jaxinfer.errors import JaxinferError
from jaxinfer.hardware.catalogue import ITEMSIZE, ModelShape
from jaxinfer.simulate.published.columns import MeasuredPoints, read_measured
from jaxinfer.simulate.published.expert_blocks import block_times
from jaxinfer.simulate.published.files import Card, cards, find_card
from jaxinfer.simulate.published.heads import read_attention
from jaxinfer.simulate.published.possible import (
    AttentionSize,
    possible_chunks,
    possible_decodes,
)
from jaxinfer.simulate.published.products import ProductTimes, without_scaling

# vLLM replays a graph for up to this many tokens; above, it launches each operator.
_GRAPH_TOKENS = 512
Points = dict[float, float]


@dataclass(frozen=True)
class Wanted:
    """A model on some GPUs, as run by a backend.

    Attributes:
        card: name of the card's folder; by default the card of the GPU that ``kind`` names.
        devices: number of devices that share each layer.
        products: format of products, ``bfloat16``, ``fp8`` or ``fp8_block``.
        kv: format of KV.
        static_scales: whether the checkpoint has scales of activations, so that none is computed.
        quickest_all_reduce: whether to use the fastest all-reduce among cards with the same link.
        possible_attention: whether to correct attention that the cards' peak FLOPs and bandwidths
            rule out.
        other_heads: whether attention of other numbers of heads may stand for a number that a table
            lacks.
        small_operators: whether to include operators on vectors.
        experts: format of experts, if it is not that of products.
        sharers: number of instances whose devices share the experts.
        expert_parallel: number of parts into which whole experts are divided; the other devices
            divide each expert.
        routing: how tokens spread over experts, as the tables name it.
        expert_blocks: whether experts are computed in blocks of rows, as many as there could be.
    """

    folder: Path
    backend: str
    version: str
    card: str | None
    kind: str
    model: ModelShape
    devices: int
    products: str
    kv: str
    static_scales: bool
    quickest_all_reduce: bool
    possible_attention: bool
    other_heads: bool
    small_operators: bool
    sharers: int
    experts: str | None
    expert_parallel: int
    routing: str
    expert_blocks: bool

    @property
    def heads(self) -> tuple[int, int]:
        """Numbers of query heads and of KV heads on each GPU."""
        model, tp = self.model, self.devices
        return model.num_attention_heads // tp, max(model.num_key_value_heads // tp, 1)


@dataclass
class OperatorPoints:
    """Microseconds of operators at measured points.

    Attributes:
        dense: points of each operator, by tokens.
        heads: points of each operator, by sequences.
        chunks: times by tokens and mean number of entries that each token sees.
        decodes: times by rows and entries.
        files: files that the points come from.
    """

    dense: dict[str, Points] = field(default_factory=dict)
    heads: dict[str, Points] = field(default_factory=dict)
    chunks: dict[tuple[float, float], float] = field(default_factory=dict)
    decodes: dict[tuple[float, float], float] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)


def convert(wanted: Wanted) -> OperatorPoints:
    """Read a model's operators.

    Raises:
        JaxinferError: a table is missing, or does not cover the model.
    """
    card = find_card(wanted.folder, wanted.card, wanted.kind)
    found = OperatorPoints()
    _add_attention(found, wanted, card)
    _add_products(found, wanted, card)
    if wanted.model.num_experts:
        _add_experts(found, wanted, card)
    _add_small(found, wanted, card)
    if wanted.devices > 1 and card.has_all_reduces:
        _add_all_reduces(found, wanted, card)
    return found


def _add_attention(found: OperatorPoints, wanted: Wanted, card: Card) -> None:
    model, (queries, keys) = wanted.model, wanted.heads
    only: dict[str, object] = {}
    only |= {"num_heads": queries, "num_key_value_heads": keys, "head_dim": model.head_size}
    only |= {"attn_dtype": "bfloat16", "kv_cache_dtype": wanted.kv, "beam_width": 1}

    def read(name: str, of: Card) -> MeasuredPoints:
        path = of.file(name, wanted.backend, wanted.version)
        return _over_layers(path, model, only, wanted.other_heads)

    prompts, answers = "context_attention_perf", "generation_attention_perf"
    chunks, decodes = read(prompts, card), read(answers, card)
    if wanted.possible_attention:
        size = ITEMSIZE if wanted.kv == "bfloat16" else 1
        full = 1 - model.windowed_layers / model.num_hidden_layers
        of = AttentionSize(queries, model.head_size, 2 * keys * model.head_size * size, full)
        chunks = possible_chunks(
            chunks, partial(read, prompts), _others(wanted, card, prompts), of, card
        )
        decodes, used = possible_decodes(
            decodes, partial(read, answers), _others(wanted, card, answers), of, card
        )
        found.files += map(str, used)
    found.files += [str(chunks.path), str(decodes.path)]
    for (batch, length, _), ms in zip(chunks.points.tolist(), chunks.ms.tolist(), strict=True):
        found.chunks.setdefault((batch * length, length / 2), ms * 1e3)
    for (batch, length, step), ms in zip(decodes.points.tolist(), decodes.ms.tolist(), strict=True):
        found.decodes[batch, length + step] = ms * 1e3


def _others(wanted: Wanted, card: Card, table: str) -> list[Card]:
    """Return the folder's other cards that have a table."""
    return [
        each
        for each in cards(wanted.folder)
        if each.name != card.name and wanted.version in each.versions(table, wanted.backend)
    ]


def _over_layers(
    path: Path, model: ModelShape, only: Mapping[str, object], other_heads: bool
) -> MeasuredPoints:
    """Return milliseconds of attention, averaged over layers with and without windows."""
    axes = ("batch_size", "isl", "step")
    read = read_attention(path, axes, only, {"window_size": 0}, other_heads)
    if not model.windowed_layers:
        return read
    windows = {**only, "window_size": model.sliding_window}
    near = read_attention(path, axes, windows, {}, other_heads)
    share = model.windowed_layers / model.num_hidden_layers
    whole, windowed = read.by_point(), near.by_point()
    both = [at for at in whole if at in windowed]
    ms = [(1 - share) * whole[at] + share * windowed[at] for at in both]
    return MeasuredPoints(path, np.array(both), np.array(ms))


def _add_products(found: OperatorPoints, wanted: Wanted, card: Card) -> None:
    model, tp, (queries, keys) = wanted.model, wanted.devices, wanted.heads
    h, each = model.hidden_size, model.intermediate_size // tp
    own = model.head_size * queries
    path = card.file("gemm_perf", wanted.backend, wanted.version)
    found.files.append(str(path))
    times = _products(path, wanted.products)
    plain = times if wanted.products == "bfloat16" else _products(path, "bfloat16")
    sizes = [("qkv_proj", own + 2 * keys * model.head_size, h), ("o_proj", h, own)]
    if not model.num_experts:
        sizes += [("gate_up_proj", (1 + model.gated) * each, h), ("down_proj", h, each)]
    for name, n, k in sizes:
        scaled = wanted.static_scales and times is not plain
        curve = without_scaling(times, plain, n, k) if scaled else times.curve(n, k)
        found.dense[name] = _micros(curve)
    if model.num_experts:
        found.dense["router"] = _micros(plain.curve(model.num_experts, h))
    found.heads["lm_head"] = _micros(plain.curve(model.vocab_size / tp, h))


def _add_experts(found: OperatorPoints, wanted: Wanted, card: Card) -> None:
    """Add both products of all experts and the steps between, which are measured together."""
    model, ways = wanted.model, wanted.expert_parallel
    devices = wanted.devices * wanted.sharers
    if devices % ways:
        raise JaxinferError(f"expert_parallel is {ways}, must divide {devices} devices")
    if wanted.expert_blocks:
        _add_blocks(found, wanted, card, devices // ways)
        return
    only: dict[str, object] = {
        "moe_dtype": wanted.experts or wanted.products,
        "hidden_size": model.hidden_size,
        "inter_size": model.intermediate_size,
        "topk": model.num_experts_per_tok,
        "num_experts": model.num_experts,
        "moe_tp_size": devices // ways,
        "moe_ep_size": ways,
        "distribution": wanted.routing,
    }
    path = card.file("moe_perf", wanted.backend, wanted.version)
    found.files.append(str(path))
    read = read_measured(path, ("num_tokens",), only, {})
    found.dense["moe"] = _by_tokens(read, 1)


def _add_blocks(found: OperatorPoints, wanted: Wanted, card: Card, divided: int) -> None:
    """Add experts as products of blocks of rows."""
    if wanted.products != "fp8_block":
        raise JaxinferError("expert_blocks takes weight_dtype: fp8 and fp8: block")
    path = card.file("gemm_perf", wanted.backend, wanted.version)
    times, plain = (_products(path, each) for each in (wanted.products, "bfloat16"))
    ways = wanted.expert_parallel
    found.dense["moe"] = block_times(
        times, plain, card, wanted.model, divided, ways, wanted.small_operators
    )


def _products(path: Path, dtype: str) -> ProductTimes:
    return ProductTimes(read_measured(path, ("m", "n", "k"), {"gemm_dtype": dtype}, {}))


def _add_small(found: OperatorPoints, wanted: Wanted, card: Card) -> None:
    model, tp, (queries, keys) = wanted.model, wanted.devices, wanted.heads
    h, heads = model.hidden_size, (queries + keys) * model.head_size
    each = 0 if model.num_experts else model.intermediate_size // tp
    numbers = {
        "layernorm": 4 * h,
        # TensorRT-LLM rotates queries and keys within its attention.
        "rotary_emb": 0 if wanted.backend == "trtllm" else 2 * heads,
        "act_fn": (2 + model.gated) * each,
        "embedding": 2 * h,
        "final_layernorm": 4 * h,
    }
    if model.qk_norm:
        numbers["qk_norm"] = 2 * heads
    counts = wanted.small_operators
    for name, each in numbers.items():
        found.dense[name] = _on_vectors(card, each * ITEMSIZE if counts else 0)
    sampled = 2 * model.vocab_size * ITEMSIZE
    found.heads["sampler"] = _on_vectors(card, sampled if counts else 0)


def _on_vectors(card: Card, num_bytes: float) -> Points:
    """Return microseconds to move these bytes, for one row and for two; nothing for 0 bytes."""
    launch = card.launch_s * (num_bytes > 0)
    return {rows: 1e6 * (launch + rows * num_bytes / card.bandwidth) for rows in (1.0, 2.0)}


def _add_all_reduces(found: OperatorPoints, wanted: Wanted, card: Card) -> None:
    """Add two all-reduces per layer, and one for the embedding."""
    alike = [card]
    if wanted.quickest_all_reduce:
        alike += [c for c in cards(wanted.folder) if c.name != card.name and c.link == card.link]
    points: Points = {}
    for number, each in enumerate(alike):
        if number and not each.versions("custom_allreduce_perf", wanted.backend):
            continue
        path = each.newest_file("custom_allreduce_perf", wanted.backend, wanted.version)
        found.files.append(str(path))
        for tokens, micros in _all_reduces(path, wanted).items():
            points[tokens] = min(micros, points.get(tokens, micros))
    found.dense["all_reduce"] = points
    embedding = found.dense["embedding"]
    slope, base = embedding[2.0] - embedding[1.0], 2 * embedding[1.0] - embedding[2.0]
    found.dense["embedding"] = {x: base + slope * x + micros for x, micros in points.items()}


def _all_reduces(path: Path, wanted: Wanted) -> Points:
    """Return microseconds by number of tokens, with ``hidden_size`` elements per token."""
    only: dict[str, object] = {"num_gpus": wanted.devices, "allreduce_dtype": "bfloat16"}
    h = wanted.model.hidden_size
    if wanted.backend != "vllm":
        return _by_tokens(read_measured(path, ("message_size",), only, {}), h)
    graph, eager = (
        _by_tokens(read_measured(path, ("message_size",), only, {"backend": kind}), h)
        for kind in ("vllm_graph", "vllm_eager")
    )
    graph = {x: micros for x, micros in graph.items() if x <= _GRAPH_TOKENS}
    return graph | {x: micros for x, micros in eager.items() if x > _GRAPH_TOKENS}


def _by_tokens(read: MeasuredPoints, hidden_size: int) -> Points:
    return {size / hidden_size: ms * 1e3 for (size,), ms in zip(read.points, read.ms, strict=True)}


def _micros(curve: Mapping[float, float]) -> Points:
    return {m: ms * 1e3 for m, ms in curve.items()}
