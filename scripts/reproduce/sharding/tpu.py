"""Llama 3.1 70B on 16 TPU v5e: two layouts that were measured, at the card's published peaks."""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from jaxinfer.hardware.catalogue import Catalogue
from jaxinfer.models.layouts import ALL, LAYOUTS, Rule
from jaxinfer.sharding.costs import LayoutCosts, LayoutFlow
from jaxinfer.sharding.links import Link
from scripts.reproduce.claims import Target, holds
from scripts.reproduce.reproduction import Inputs, Part
from scripts.tables import Row

CHIPS, CARD, MODEL = 16, "TPU-v5e", "llama-3-70b"
# Batch, context length, then for TP16 and for DP2 x TP8: seconds of prefill, and tokens per second
# of one sequence. From llama3/README.md of https://github.com/jax-ml/jax-llm-examples, commit
# 440b2a0 (Apache-2.0): jax 0.6.0, weights and KV in int8, the batch is that of all chips.
MEASURED = (
    (8, 2048, 0.496, 159, 0.309, 84.4),
    (8, 4096, 0.497, 146, 0.309, 83.4),
    (8, 8192, 0.501, 146, 0.311, 81.7),
    (16, 2048, 1.02, 135, 0.649, 80.2),
    (16, 4096, 1.02, 129, 0.652, 79.5),
    (16, 8192, 1.03, 123, 0.655, 76.9),
    (32, 2048, 2.05, 108, 1.35, 74.5),
    (32, 4096, 2.05, 100, 1.35, 74),
    (32, 8192, 2.07, 93.8, 1.35, 71.3),
    (64, 2048, 4.10, 68.7, 2.69, 58.4),
    (64, 4096, 4.12, 62.7, 2.70, 58.1),
    (128, 2048, 8.27, 39.3, 5.43, 50.2),
)
LAYOUT_NAMES = ("TP16", "DP2 x TP8")
# The published program's: ``megatron``, with the head cut by its vocabulary.
_MEGATRON = LAYOUTS["megatron"]
LAYOUT = replace(
    _MEGATRON,
    parameters=(Rule("head_VD", {"V": ALL}), *_MEGATRON.parameters),
    activations={**_MEGATRON.activations, "logits": {"V": ALL}},
)
# The kernel for decodes reads whole blocks of this many entries, as far as the cache is filled.
BLOCK = 512


class Assumed(NamedTuple):
    """Assumptions about what the published table leaves open.

    Attributes:
        filled: KV entries that a decode reads; None for all of the context length.
        gb_s: rate of collectives in each direction; None for the catalogue's.
        flops, bandwidth: shares of the peaks.
    """

    filled: int | None = BLOCK
    gb_s: float | None = None
    flops: float = 1.0
    bandwidth: float = 1.0


ASSUMED = {
    "as claimed": Assumed(),
    "the whole context is filled": Assumed(filled=None),
    "nothing is filled": Assumed(filled=0),
    "links of two axes, 90 GB/s": Assumed(gb_s=90),
    "all four links, 200 GB/s": Assumed(gb_s=200),
    "simulate's default shares, 0.6 and 0.7": Assumed(flops=0.6, bandwidth=0.7),
}


def rates(inputs: Inputs) -> Part:
    """Tokens per second of Llama 3.1 70B on 16 TPU v5e, two layouts, measured and ours."""
    rows: list[Row] = []
    for batch, context, *measured in MEASURED:
        ours = _both(batch, context, Assumed())
        row: Row = {"batch": batch, "context": context}
        for name, tokens_s, found in zip(LAYOUT_NAMES, measured[1::2], ours, strict=True):
            row |= {f"{name} measured": tokens_s, f"{name} ours": round(found, 1)}
            row[f"{name} error %"] = round(100 * (found / tokens_s - 1), 1)
        row |= {"faster": _faster(measured[1::2]), "faster, ours": _faster(ours)}
        rows.append(row)
    others: list[Row] = []
    for name, assumed in ASSUMED.items():
        right, off, most = _summary(assumed)
        others.append(
            {
                "assumption": name,
                "faster layout right": right,
                "median error %": round(100 * off, 1),
                "largest error %": round(100 * most, 1),
            }
        )
    return Part(rows, _claims(), beside={"tpu_assumptions": others})


def _claims() -> list[Target]:
    right, off, _ = _summary(Assumed())
    of = f"of {len(MEASURED)} pairs"
    return [
        holds(
            "16 TPU v5e: the faster layout of decodes", f"12 {of}", f"{right} {of}", right >= 11,
            f"at least 11 {of}",
        ),
        holds(
            "16 TPU v5e: error of tokens/s, 24 rows, median", "0 %", f"{100 * off:.1f} %",
            off <= 0.2, "at most 20 %",
        ),
    ]  # fmt: skip


def _costs(replicas: int, assumed: Assumed) -> LayoutCosts:
    """Return the costs of a replica, whose weights and KV are in int8."""
    catalogue, mesh = Catalogue(), {"x": CHIPS // replicas}
    gpu = catalogue.gpu(CARD)
    gb_s, each_s = gpu.stated_collective
    links = {"x": Link(assumed.gb_s or gb_s, each_s)}
    flow = LayoutFlow(catalogue.model(MODEL), LAYOUT, mesh)
    return LayoutCosts(
        flow, gpu, links, assumed.flops, assumed.bandwidth, weight_size=1, kv_size=1, table_size=2
    )


def _both(batch: int, context: int, assumed: Assumed) -> list[float]:
    """Return tokens per second of one sequence, under both layouts."""
    seen = context if assumed.filled is None else assumed.filled
    found = []
    for replicas in (1, 2):
        own = batch // replicas
        found.append(1 / _costs(replicas, assumed).step(own, own, max(seen - 1, 0)).step.total)
    return found


def _faster(tokens_s: Sequence[float]) -> str:
    return LAYOUT_NAMES[tokens_s[1] > tokens_s[0]]


def _summary(assumed: Assumed) -> tuple[int, float, float]:
    """Return how many pairs have the right order, and median and largest error of tokens/s."""
    right, off = 0, []
    for batch, context, *measured in MEASURED:
        ours = _both(batch, context, assumed)
        right += _faster(ours) == _faster(measured[1::2])
        off += [abs(a / b - 1) for a, b in zip(ours, measured[1::2], strict=True)]
    return right, statistics.median(off), max(off)
