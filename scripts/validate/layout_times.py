"""Measure layers under layouts on eight host devices, and compare with the cost model.

    python -m scripts.validate.layout_times OUT.csv

The program runs one layer of a small model, with weights, under each layout, in both phases and two
sizes. Figures are medians of rounds in which the cases take turns. Predictions use rates that are
measured in the same rounds: of matrix products, of reads of a weight, of passes over existing and
over new memory, and of collectives. The program prints Kendall's tau over all cases, and over the
layouts of each phase and size. Nothing else should run on the machine.
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
from jaxinfer.lab.sharding.layer import Program  # noqa: E402
from jaxinfer.lab.sharding.targets import CompileTarget  # noqa: E402
from jaxinfer.models.layouts import LAYOUTS, Layout, ways  # noqa: E402
from jaxinfer.sharding.collectives import Collective, moved, without_reduce_scatter  # noqa: E402
from jaxinfer.sharding.costs import LayoutFlow  # noqa: E402
from scripts.tables import Row, show_table, write_csv  # noqa: E402

MESH = {"x": 2, "y": 4}
MODEL = ModelShape(
    hidden_size=1024, intermediate_size=4096, num_hidden_layers=1, num_attention_heads=16,
    num_key_value_heads=8, vocab_size=256,
)  # fmt: skip
CONTEXT = 128
# Tokens of a prompt, or numbers of sequences.
SIZES = {"prefill": (256, 1024), "decode": (32, 128)}
# Without experts, layouts of experts equal megatron and sequence_parallel.
NAMES = [name for name in LAYOUTS if not name.startswith("expert_")]
ROUNDS = 5


def seconds_of(run: Callable[[], Any]) -> float:
    """Return the seconds until a result is there."""
    started = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - started


@dataclass(frozen=True)
class Rates:
    """Rates of one device while the other devices do the same.

    Attributes:
        launch: seconds of a program that does nothing.
        flops: FLOPs per second of a large product.
        product: seconds of a product divided by the size of its weight, by number of rows.
        stream: bytes per second that sums and norms read and write.
        fresh: bytes per second of memory that the system allocates, in pages that it clears.
        each: for each kind of collective, the bytes that a device sends per second, and additional
            seconds.
        last: bytes per second of an all-gather along an array's last axis, whose pieces are
            separate rows.
    """

    launch: float
    flops: float
    product: Mapping[int, float]
    stream: float
    fresh: float
    each: Mapping[str, tuple[float, float]]
    last: float


# Rows of a square product, and of products with a weight; and a device's share of other arrays, in
# numbers.
SQUARE, ROWS = 512, (1, 4, 16, 64, 256)
NUMBERS, LARGE, SMALL = 1 << 21, 1 << 24, 1 << 12
CHAIN = 9
# From this number of bytes on, glibc's malloc takes a buffer's pages from the system, and returns
# them.
FRESH = 32 << 20


def calibration(mesh: Mesh) -> dict[str, Callable[[], Any]]:
    """Return runs whose seconds give the rates."""
    cut = NamedSharding(mesh, PartitionSpec(mesh.axis_names))

    def ones(*shape: int) -> jax.Array:
        return jax.device_put(np.ones((DEVICES, *shape), np.float32), cut)

    one, x = ones(1), ones(SQUARE, SQUARE)
    weight, large = ones(1024, NUMBERS // 1024), ones(LARGE)
    apart = jax.device_put(
        np.ones((NUMBERS // 1024, 1024), np.float32),
        NamedSharding(mesh, PartitionSpec(None, mesh.axis_names)),
    )
    whole = jax.jit(lambda x: x + 0, out_shardings=NamedSharding(mesh, PartitionSpec()))
    runs: dict[str, Callable[[], Any]] = {
        "launch": lambda: increase(one),
        "flops": lambda: multiply(x, x),
        "stream": in_place(ones(1024, NUMBERS // 1024)),
        "last": lambda: whole(apart),
    }
    for rows in ROWS:
        runs[f"{rows} rows"] = partial(multiply, ones(rows, 1024), weight)
    for kind in COLLECTIVES:
        runs[kind] = collective(mesh, kind, NUMBERS)
        runs[f"{kind}, small"] = collective(mesh, kind, SMALL)
        runs[f"{kind}, chain"] = collective(mesh, kind, SMALL, CHAIN)
    runs["fresh"] = lambda: increase(large)
    return runs


def rates(seconds: Mapping[str, float]) -> Rates:
    """Return the rates, from the seconds of those runs.

    The additional seconds of a collective are those by which one more of them lengthens a program.
    Its rate is that of a large collective without these seconds.
    """
    launch = seconds["launch"]

    def rate(amount: float, name: str, besides: float = 0.0) -> float:
        left = seconds[name] - launch - besides
        if left <= 0:
            raise click.ClickException(
                f"{name} took {seconds[name]:.2g} s, less than the {launch + besides:.2g} s to be "
                "taken off: something else runs here, try again"
            )
        return amount / left

    stream = rate(2 * 4 * NUMBERS, "stream")
    each = {}
    for kind in COLLECTIVES:
        fixed = (seconds[f"{kind}, chain"] - seconds[f"{kind}, small"]) / (CHAIN - 1)
        fixed = max(fixed, 0.0)
        each[kind] = rate(4 * NUMBERS * moved(kind, DEVICES), kind, fixed), fixed
    return Rates(
        launch,
        rate(2 * SQUARE**3, "flops"),
        {rows: 1 / rate(NUMBERS, f"{rows} rows") for rows in ROWS},
        stream,
        rate(4 * LARGE, "fresh", 2 * 4 * LARGE / stream),
        each,
        rate(4 * NUMBERS * moved("all-gather", DEVICES), "last", each["all-gather"][1]),
    )


# As functions of a device's part, which has the same size on all devices, and of the mesh's axes.
COLLECTIVES: dict[str, Callable[[jax.Array, Any], jax.Array]] = {
    "all-reduce": jax.lax.psum,
    "all-gather": partial(jax.lax.all_gather, tiled=True),
    "all-to-all": partial(jax.lax.all_to_all, split_axis=0, concat_axis=0, tiled=True),
}


def in_place(x: jax.Array) -> Callable[[], jax.Array]:
    """Return a run that adds to an array in place, without new memory."""
    held = [x]
    add = jax.jit(lambda x: x + 1, donate_argnums=0)

    def run() -> jax.Array:
        held[0] = add(held[0])
        return held[0]

    return run


@jax.jit
def multiply(x: jax.Array, y: jax.Array) -> jax.Array:
    """Multiply on each device."""
    return jnp.einsum("bij,bjk->bik", x, y)


@jax.jit
def increase(x: jax.Array) -> jax.Array:
    """Pass over the data of each device."""
    return x + 1


def collective(mesh: Mesh, kind: str, numbers: int, chain: int = 1) -> Callable[[], jax.Array]:
    """Return a run of ``chain`` successive collectives of an array of ``numbers`` numbers.

    ``dataflow.Collective`` defines how numbers are counted.
    """
    here = numbers // DEVICES if kind == "all-gather" else numbers
    spec = PartitionSpec(mesh.axis_names)
    x = jax.device_put(np.ones(DEVICES * here, np.float32), NamedSharding(mesh, spec))

    def run(part: jax.Array) -> jax.Array:
        for _ in range(chain):
            out = COLLECTIVES[kind](part, mesh.axis_names)
            part = out[:here] + 1
        return out

    to = spec if kind == "all-to-all" else PartitionSpec()
    on_mesh = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=to, check_vma=False)
    compiled = jax.jit(on_mesh)
    return lambda: compiled(x)


def layer(layout: Layout, mesh: Mesh, phase: str, tokens: int) -> Callable[[], Any]:
    """Return a compiled layer with its arrays; decodes write their KV in place."""
    flow = LayoutFlow(MODEL, layout, MESH)
    target = CompileTarget("cpu", (mesh.size,))
    program = Program(flow.model, layout, mesh, CONTEXT, np.dtype("float32"), target)
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
    """Return the seconds of a layer by its products, reads, collectives and new memory.

    On these devices, products of few rows are far from the rate of products of many rows: 16 rows
    take five times as long as one, and 256 take twenty times as long. Each product therefore takes
    the measured time for its number of rows. A reduce-scatter counts as an all-reduce here.
    """
    flow = LayoutFlow(MODEL, layout, MESH)
    part = flow.layer.attention
    assert part
    multiplied = sum(
        each.weights * product_s(tokens * each.rows, rates) for each in flow.layer.products
    )
    # All scores of a prompt are computed, and then masked.
    pairs, entries = (
        (tokens * tokens, tokens)
        if phase == "prefill"
        else (tokens * CONTEXT, tokens * CONTEXT * part.tokens)
    )
    H = flow.model.head_size
    flops = 4 * pairs * part.tokens * part.heads * H
    # A product of one row takes as long as reading the weight.
    read_s = 2 * entries * part.kv_heads * H * rates.product[1]
    # Each half of a layer has a norm, which reads its input twice and writes it, and a sum of two
    # arrays. These are six passes over the residual stream, in place. Scores are written, read for
    # the maximum, read and written as shares, and read for the sum and for the product.
    places = flow.layout.activations.get("residual", {})
    pieces = math.prod(ways(place, MESH) for place in places.values())
    passes = 2 * 6 * tokens * MODEL.hidden_size / pieces
    passes += 6 * pairs * part.tokens * part.heads
    seconds = rates.launch + multiplied + flops / rates.flops + read_s
    seconds += 4 * passes / rates.stream + fresh_bytes(flow) / rates.fresh
    for each in without_reduce_scatter(flow.layer.collectives):
        rate, fixed = rates.each[each.kind]
        if is_apart(each):
            rate = rates.last
        seconds += 4 * each.moved * (tokens if "T" in each.letters else 1) / rate + fixed
    return seconds


def product_s(rows: float, rates: Rates) -> float:
    """Return the seconds of a product divided by the size of its weight.

    Beyond the measured numbers of rows, the seconds are proportional to the rows.
    """
    most = max(ROWS)
    found = np.interp(min(rows, most), ROWS, [rates.product[each] for each in ROWS])
    return float(found) * max(rows / most, 1.0)


def is_apart(each: Collective) -> bool:
    """True for a weight that is gathered along its last axis."""
    return "T" not in each.letters and each.letters.endswith("D")


def fresh_bytes(flow: LayoutFlow) -> float:
    """Return the bytes of new memory for gathered weights that a device needs in each run.

    One buffer holds all of them. Weights that are gathered along their last axis are in it twice:
    as they arrive, and in order.
    """
    weights = [each for each in flow.layer.collectives if "T" not in each.letters]
    needed = 4 * sum(each.numbers * (1 + is_apart(each)) for each in weights)
    return needed if needed > FRESH else 0.0


def tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Return Kendall's tau: the share of pairs in the same order, minus the share of the others."""
    signs = [np.sign(a[0] - b[0]) * np.sign(a[1] - b[1]) for a, b in combinations(pairs, 2)]
    return float(np.mean(signs))


def in_turns(runs: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """Return medians of seconds, of rounds in which the runs take turns.

    A first round does not count.
    """
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(1 + ROUNDS):
        for name, run in runs.items():
            if name in NAMES:
                # The previous run may have left memory that is returned during this one.
                seconds_of(run)
            seconds = seconds_of(run)
            if number:
                taken[name].append(seconds)
    return {name: median(found) for name, found in taken.items()}


def said(rates: Rates) -> str:
    """Return the rates as one line of text."""
    products = ", ".join(f"{rows}: {1e9 * s:.2f}" for rows, s in rates.product.items())
    each = ", ".join(f"{k} {r / 1e9:.2f}, {s * 1e6:.0f}" for k, (r, s) in rates.each.items())
    return (
        f"launch {rates.launch * 1e6:.0f} us, {rates.flops / 1e9:.1f} GFLOP/s; ns per number of "
        f"weights by rows: {products}; GB/s {rates.stream / 1e9:.2f} of sums, "
        f"{rates.fresh / 1e9:.2f} of new memory; GB/s and us of collectives: {each}; along a last "
        f"axis {rates.last / 1e9:.2f}"
    )


@click.command()
@click.argument("out")
def main(out: str) -> None:
    """Measure, predict, and write both."""
    mesh = Mesh(np.array(jax.devices()).reshape(*MESH.values()), tuple(MESH))
    runs = calibration(mesh)
    rows: list[Row] = []
    for phase, sizes in SIZES.items():
        for tokens in sizes:
            layers = {name: layer(LAYOUTS[name], mesh, phase, tokens) for name in NAMES}
            taken = in_turns({**runs, **layers})
            found = rates(taken)
            print(f"{phase}, {tokens} tokens, one of {DEVICES} devices: {said(found)}")
            rows += [
                {
                    "phase": phase,
                    "tokens": tokens,
                    "layout": name,
                    "measured_ms": round(1e3 * taken[name], 3),
                    "predicted_ms": round(1e3 * predicted(LAYOUTS[name], found, phase, tokens), 3),
                }
                for name in NAMES
            ]
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
