"""Layers under layouts, measured on eight host devices beside what their costs say.

    python -m scripts.validate.layout_times OUT.csv

One layer of a small model, with weights, under each layout, in both phases and two sizes; medians
of rounds in turns. What is predicted goes by rates that are measured first: a matrix product, reads
of a weight, and all-reduces of two sizes. Prints Kendall's tau of all cases, and of the layouts of
each phase and size. Nothing else should run meanwhile.
"""

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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

from jaxinfer.hardware.catalogue import ModelShape  # noqa: E402
from jaxinfer.models.layouts import LAYOUTS, Layout, ways  # noqa: E402
from jaxinfer.sharding.collectives import moved, without_reduce_scatter  # noqa: E402
from jaxinfer.sharding.costs import LayoutFlow  # noqa: E402
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


@dataclass(frozen=True)
class Rates:
    """Rates of one of the devices while the others do the same.

    Attributes:
        flops: per second; ``memory``: bytes per second of a weight that is read; ``stream``: those
            that sums and norms read and write.
        each: kind of collective -> bytes that a device sends per second, and seconds besides.
        last: bytes per second of an all-gather along an array's last axis, whose pieces are rows
            that lie apart.
    """

    flops: float
    memory: float
    stream: float
    each: Mapping[str, tuple[float, float]]
    last: float


def measured(mesh: Mesh) -> Rates:
    """Measure products, reads of weights, and collectives over all devices in two sizes."""
    cut = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    n = 512
    x = jax.device_put(np.ones((DEVICES, n, n), np.float32), cut)
    flops = 2 * n**3 / timed(lambda: multiply(x, x))
    numbers = 4 << 20
    row = jax.device_put(np.ones((DEVICES, 1, 1024), np.float32), cut)
    weight = jax.device_put(np.ones((DEVICES, 1024, numbers // 1024), np.float32), cut)
    memory = 4 * numbers / timed(lambda: multiply(row, weight))
    stream = 2 * 4 * numbers / timed(lambda: increase(weight))
    each = {}
    for kind, one in COLLECTIVES.items():
        small, large = (
            (4 * numbers * moved(kind, DEVICES), timed(collective(mesh, kind, one, numbers)))
            for numbers in (1 << 12, 1 << 21)
        )
        per_byte = (large[1] - small[1]) / (large[0] - small[0])
        each[kind] = 1 / per_byte, max(small[1] - small[0] * per_byte, 0.0)
    apart = jax.device_put(
        np.ones((4096, numbers // 4096), np.float32),
        NamedSharding(mesh, PartitionSpec(None, mesh.axis_names)),
    )
    whole = jax.jit(lambda x: x + 0, out_shardings=NamedSharding(mesh, PartitionSpec()))
    last = 4 * numbers * moved("all-gather", DEVICES) / timed(lambda: whole(apart))
    return Rates(flops, memory, stream, each, last)


# As functions of a device's part, of which all have the same size, and the mesh's axes.
COLLECTIVES: dict[str, Callable[[jax.Array, Any], jax.Array]] = {
    "all-reduce": jax.lax.psum,
    "all-gather": partial(jax.lax.all_gather, tiled=True),
    "all-to-all": partial(jax.lax.all_to_all, split_axis=0, concat_axis=0, tiled=True),
}


@jax.jit
def multiply(x: jax.Array, y: jax.Array) -> jax.Array:
    """A product on each device."""
    return jnp.einsum("bij,bjk->bik", x, y)


@jax.jit
def increase(x: jax.Array) -> jax.Array:
    """A pass over what each device has."""
    return x + 1


def collective(
    mesh: Mesh, kind: str, one: Callable[[jax.Array, Any], jax.Array], numbers: int
) -> Callable[[], jax.Array]:
    """A collective of an array of so many numbers, as ``dataflow.Collective`` counts them."""
    here = numbers // DEVICES if kind == "all-gather" else numbers
    spec = PartitionSpec(mesh.axis_names)
    x = jax.device_put(np.ones(DEVICES * here, np.float32), NamedSharding(mesh, spec))
    compiled = jax.jit(
        jax.shard_map(
            lambda part: one(part, mesh.axis_names),
            mesh=mesh,
            in_specs=spec,
            out_specs=spec if kind == "all-to-all" else PartitionSpec(),
            check_vma=False,
        )
    )
    return lambda: compiled(x)


def layer(layout: Layout, mesh: Mesh, phase: str, tokens: int) -> Callable[[], Any]:
    """A compiled layer with its arrays; decodes write their KV in place."""
    flow = LayoutFlow(MODEL, layout, MESH)
    program = Program(flow.model, layout, mesh, CONTEXT, np.dtype("float32"))
    x, weights, kv = jax.tree.map(
        lambda x: jax.device_put(np.full(x.shape, 1e-2, x.dtype), x.sharding),
        program.layer_arguments(tokens, phase == "decode"),
    )
    donated = (2,) if kv else ()
    compiled = jax.jit(program.layer, donate_argnums=donated).lower(x, weights, kv).compile()
    state = [kv]

    def run() -> jax.Array:
        out, new = compiled(x, weights, state[0])
        state[0] = new if kv else None
        return out

    return run


def predicted(layout: Layout, rates: Rates, phase: str, tokens: int) -> float:
    """Seconds of a layer by what its flow multiplies, reads and sends.

    On these devices a product takes what its multiplications take and what its weight's reading
    takes, one after the other (1 to 256 rows of 1,024 by 4,096, within 15 %). A reduce-scatter is
    an all-reduce here.
    """
    flow = LayoutFlow(MODEL, layout, MESH)
    part = flow.layer.attention
    assert part
    flops = tokens * sum(each.flops for each in flow.layer.products)
    read = sum(each.weights for each in flow.layer.products)
    pairs, entries = (
        (tokens * (tokens + 1) / 2, tokens)
        if phase == "prefill"
        else (tokens * CONTEXT, tokens * CONTEXT * part.tokens)
    )
    H = flow.model.head_size
    flops += 4 * pairs * part.tokens * part.heads * H
    read += 2 * entries * part.kv_heads * H
    # Each half of a layer has a norm, which reads its input twice and writes, and a sum of two:
    # six passes over the residual stream, where it lies.
    places = flow.layout.activations.get("residual", {})
    pieces = math.prod(ways(place, MESH) for place in places.values())
    passes = 2 * 6 * tokens * MODEL.hidden_size / pieces
    seconds = flops / rates.flops + 4 * read / rates.memory
    seconds += 4 * passes / rates.stream
    for each in without_reduce_scatter(flow.layer.collectives):
        rate, fixed = rates.each[each.kind]
        if "T" not in each.letters and each.letters.endswith("D"):
            rate = rates.last
        seconds += 4 * each.moved * (tokens if "T" in each.letters else 1) / rate + fixed
    return seconds


def tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Kendall's tau: the share of pairs in one order, less that in the other."""
    signs = [np.sign(a[0] - b[0]) * np.sign(a[1] - b[1]) for a, b in combinations(pairs, 2)]
    return float(np.mean(signs))


@click.command()
@click.argument("out")
def main(out: str) -> None:
    """Measure, predict, and write both."""
    mesh = Mesh(np.array(jax.devices()).reshape(*MESH.values()), tuple(MESH))
    rates = measured(mesh)
    print(
        f"one of {DEVICES} devices: {rates.flops / 1e9:.1f} GFLOP/s, {rates.memory / 1e9:.2f} "
        f"GB/s of weights, {rates.stream / 1e9:.2f} of sums; GB/s and us of collectives: "
        + ", ".join(f"{k} {r / 1e9:.2f}, {s * 1e6:.0f}" for k, (r, s) in rates.each.items())
        + f"; along a last axis {rates.last / 1e9:.2f}"
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
                    # The one before may have left memory that is returned meanwhile.
                    seconds_of(run)
                    taken[name].append(seconds_of(run))
            for name in NAMES:
                ms = 1e3 * predicted(LAYOUTS[name], rates, phase, tokens)
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
