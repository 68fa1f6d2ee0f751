"""Layers under layouts, measured on eight host devices beside what their costs say.

    python -m scripts.validate.layout_times OUT.csv

One layer of a small model, with weights, under each layout, in both phases and two sizes; medians
of rounds in turns. What is predicted goes by rates that are measured first: a matrix product, reads
of a weight, and all-reduces of two sizes. Prints Kendall's tau of all cases, and of the layouts of
each phase and size. Nothing else should run meanwhile.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

DEVICES = 8
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
)

import click  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

from jaxinfer.hardware.catalogue import Gpu, ModelShape  # noqa: E402
from jaxinfer.models.layouts import LAYOUTS, Layout  # noqa: E402
from jaxinfer.sharding.collectives import without_reduce_scatter  # noqa: E402
from jaxinfer.sharding.costs import LayoutCosts, LayoutFlow, Link  # noqa: E402
from jaxinfer.sharding.layer import Program  # noqa: E402
from scripts.tables import Row, show_table, write_csv  # noqa: E402

MESH = {"x": 2, "y": 4}
MODEL = ModelShape(
    hidden_size=1024, intermediate_size=4096, num_hidden_layers=1, num_attention_heads=16,
    num_key_value_heads=8, vocab_size=256,
)  # fmt: skip
CONTEXT = 128
# Tokens of a prompt, or sequences.
SIZES = {"prefill": (256, 1024), "decode": (32, 128)}
# Without experts, expert_parallel is megatron.
NAMES = [name for name in LAYOUTS if name != "expert_parallel"]
ROUNDS = 9


def seconds_of(run: Callable[[], Any]) -> float:
    """Seconds until a result is there."""
    started = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - started


def timed(run: Callable[[], Any], rounds: int = ROUNDS) -> float:
    """The median of some runs, after one that does not count."""
    seconds_of(run)
    return median(seconds_of(run) for _ in range(rounds))


def rates(mesh: Mesh) -> tuple[Gpu, Link]:
    """What one of the devices does while the others do the same, and a ring through all."""
    cut = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    n = 512
    x = jax.device_put(np.ones((DEVICES, n, n), np.float32), cut)
    products = timed(lambda: multiply(x, x))
    flops = 2 * n**3 / products
    size = 4 << 20
    row = jax.device_put(np.ones((DEVICES, 1, 1024), np.float32), cut)
    weight = jax.device_put(np.ones((DEVICES, 1024, size // 1024), np.float32), cut)
    memory = 4 * size / timed(lambda: multiply(row, weight))
    small, large = (1 << 10, 1 << 20)
    reduced = {numbers: timed(all_reduce(mesh, numbers)) for numbers in (small, large)}
    sent = {numbers: 4 * numbers * 2 * (DEVICES - 1) / DEVICES for numbers in reduced}
    per_byte = (reduced[large] - reduced[small]) / (sent[large] - sent[small])
    each_s = max(reduced[small] - sent[small] * per_byte, 0.0)
    card = Gpu(
        bf16_tflops=flops / 1e12, memory_gb=24, memory_gb_s=memory / 1e9, link="memory",
        link_gb_s=1 / per_byte / 1e9,
    )  # fmt: skip
    return card, Link(card.link_gb_s, each_s)


@jax.jit
def multiply(x: jax.Array, y: jax.Array) -> jax.Array:
    """One product on each device."""
    return jnp.einsum("bij,bjk->bik", x, y)


def all_reduce(mesh: Mesh, numbers: int) -> Callable[[], jax.Array]:
    """An all-reduce of so many numbers on each device."""
    x = jnp.ones((DEVICES, numbers), jnp.float32)
    spec = PartitionSpec(mesh.axis_names)
    x = jax.device_put(x, NamedSharding(mesh, spec))
    reduce = jax.jit(
        jax.shard_map(
            lambda part: jax.lax.psum(part, mesh.axis_names),
            mesh=mesh,
            in_specs=spec,
            out_specs=PartitionSpec(),
        )
    )
    return lambda: reduce(x)


def layer(layout: Layout, mesh: Mesh, phase: str, tokens: int) -> Callable[[], Any]:
    """A compiled layer with its arrays."""
    flow = LayoutFlow(MODEL, layout, MESH)
    program = Program(flow.model, layout, mesh, CONTEXT, np.dtype("float32"))
    arguments = jax.tree.map(
        lambda x: jax.device_put(np.full(x.shape, 1e-2, x.dtype), x.sharding),
        program.layer_arguments(tokens, phase == "decode"),
    )
    compiled = jax.jit(program.layer).lower(*arguments).compile()
    return lambda: compiled(*arguments)[0]


def predicted(layout: Layout, card: Gpu, link: Link, phase: str, tokens: int) -> float:
    """Seconds of a layer; a reduce-scatter is an all-reduce here."""
    flow = LayoutFlow(MODEL, layout, MESH)
    collectives = without_reduce_scatter(flow.layer.collectives)
    flow.layer = replace(flow.layer, collectives=collectives)
    costs = LayoutCosts(flow, card, dict.fromkeys(MESH, link), itemsize=4, weight_size=4, kv_size=4)
    if phase == "prefill":
        attention = costs.attention(tokens * (tokens + 1) / 2, tokens, tokens)
    else:
        entries = tokens * CONTEXT
        attention = costs.attention(entries, entries, CONTEXT)
    return (costs.dense(tokens) + attention).total


def tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Kendall's tau: the share of pairs in one order, less that in the other."""
    signs = [np.sign(a[0] - b[0]) * np.sign(a[1] - b[1]) for a, b in combinations(pairs, 2)]
    return float(np.mean(signs))


@click.command()
@click.argument("out")
def main(out: str) -> None:
    """Measure, predict, and write both."""
    mesh = Mesh(np.array(jax.devices()).reshape(*MESH.values()), tuple(MESH))
    card, link = rates(mesh)
    print(
        f"one of {DEVICES} devices: {card.bf16_tflops * 1e3:.1f} GFLOP/s, {card.memory_gb_s:.2f} "
        f"GB/s of weights, links {link.gb_s:.2f} GB/s and {link.each_s * 1e6:.0f} us each"
    )
    rows: list[Row] = []
    for phase, sizes in SIZES.items():
        for tokens in sizes:
            runs = {name: layer(LAYOUTS[name], mesh, phase, tokens) for name in NAMES}
            for run in runs.values():
                seconds_of(run)
            taken: dict[str, list[float]] = {name: [] for name in NAMES}
            for _ in range(ROUNDS):
                for name, run in runs.items():
                    taken[name].append(seconds_of(run))
            for name in NAMES:
                ms = 1e3 * predicted(LAYOUTS[name], card, link, phase, tokens)
                rows.append(
                    {
                        "phase": phase,
                        "tokens": tokens,
                        "layout": name,
                        "measured_ms": round(1e3 * median(taken[name]), 3),
                        "predicted_ms": round(ms, 3),
                    }
                )
    show_table(rows)
    print(f"\nKendall's tau of all {len(rows)} cases: {tau(_pairs(rows)):.2f}")
    for phase, sizes in SIZES.items():
        for tokens in sizes:
            some = [row for row in rows if (row["phase"], row["tokens"]) == (phase, tokens)]
            print(f"{phase}, {tokens} tokens: {tau(_pairs(some)):.2f} of {len(some)} layouts")
    write_csv(Path(out), rows)


def _pairs(rows: Sequence[Row]) -> list[tuple[float, float]]:
    return [(row["predicted_ms"], row["measured_ms"]) for row in rows]


if __name__ == "__main__":
    main()
