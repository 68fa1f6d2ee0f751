"""Products of rows with weights on a CPU: numba's and XLA's own, in turns in one run.

    python -m scripts.bench.products --out products.csv

The products are those of the layers and of the head, for three shapes, in float32 and bfloat16.
There are more weights than a cache holds, as in an engine, where each layer has its own. Figures
are medians of rounds. The program exits with 1 if the default's (numba's) take more than 1.05 times
as long as plain JAX's. Nothing else should run on the machine.
"""

import csv
import time
from collections.abc import Callable
from itertools import cycle
from statistics import median
from typing import NamedTuple

import click
import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models import layers

# Smallest number of bytes of one product's weights, used in turns: three times a large cache.
COLD = 2**27
# Smallest number of seconds of one measurement.
LEAST_S = 0.02
MOST = 1.05


class Shape(NamedTuple):
    """Sizes of a model: hidden, all heads, all KV heads, feed-forward, and vocabulary."""

    D: int
    N: int
    K: int
    F: int
    V: int

    def products(self, rows: int) -> list[tuple[str, str, int, int]]:
        """Return name, kind, inputs and outputs of each product; heads have a row per sequence."""
        D, N, K, F, V = self
        found = [("q", "dense", D, N), ("k", "dense", D, K), ("v", "dense", D, K)]
        found += [("o", "dense", N, D), ("gate, up", "gated", D, F), ("down", "dense", F, D)]
        return found + [("head", "head", D, V)] * (rows <= 64)


SHAPES = {
    "135M": Shape(576, 576, 192, 1536, 49152),
    "1B": Shape(2048, 2048, 512, 8192, 128256),
    "8B": Shape(4096, 4096, 1024, 14336, 32064),
}


def run_of(
    kind: str, D: int, F: int, dtype: str, rows: int
) -> Callable[[str], Callable[[], object]]:
    """Return a function from the name of kernels to a call of the product."""
    shape, each = (F, D) if kind == "head" else (D, F), 2 if kind == "gated" else 1
    random = np.random.default_rng(0)
    numbers = random.standard_normal(shape, np.float32)
    size = numbers.size * jnp.dtype(dtype).itemsize * each
    sets = [
        [jnp.array(numbers, dtype) for _ in range(each)] for _ in range(max(-(-COLD // size), 1))
    ]
    x = jnp.asarray(random.standard_normal((rows, D), np.float32))

    def of(kernels: str) -> Callable[[], object]:
        if kind == "gated":
            call = jax.jit(lambda x, w, u: layers.gated(x, w, u, jax.nn.silu, kernels))
        else:
            function = layers.head if kind == "head" else layers.dense
            call = jax.jit(lambda x, w: function(x, w, kernels))
        turns = cycle(sets)
        return lambda: call(x, *next(turns)).block_until_ready()

    return of


def seconds(run: Callable[[], object], calls: int) -> float:
    """Return the seconds of one call."""
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls


def side_by_side(of: Callable[[str], Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return medians of rounds in which the runs take turns."""
    runs = {kernels: of(kernels) for kernels in ("numba", "plain")}
    calls, took = {}, dict[str, list[float]]()
    for kernels, run in runs.items():
        run()
        calls[kernels] = max(int(LEAST_S / seconds(run, 1)), 1)
    for _ in range(rounds):
        for kernels, run in runs.items():
            took.setdefault(kernels, []).append(seconds(run, calls[kernels]))
    return {kernels: median(found) for kernels, found in took.items()}


@click.command()
@click.option("--shape", "shapes", type=click.Choice(list(SHAPES)), multiple=True)
@click.option("--dtype", "dtypes", multiple=True, default=("float32", "bfloat16"))
@click.option("--rows", type=click.IntRange(min=1), multiple=True, default=(1, 16, 64, 512))
@click.option("--only", multiple=True, help="Products of these names.")
@click.option("--rounds", type=click.IntRange(min=1), default=5)
@click.option("--out", required=True, help="File for the table, as CSV.")
def main(
    shapes: tuple[str, ...],
    dtypes: tuple[str, ...],
    rows: tuple[int, ...],
    only: tuple[str, ...],
    rounds: int,
    out: str,
) -> None:
    """Measure, print and write; exit with 1 if the default is slower."""
    slow = 0
    with open(out, "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(("shape", "dtype", "rows", "product", "numba_ms", "plain_ms", "ratio"))
        for name in shapes or SHAPES:
            for dtype in dtypes:
                for count in rows:
                    total = dict.fromkeys(("numba", "plain"), 0.0)
                    known = dict[tuple[str, int, int], dict[str, float]]()
                    for product, kind, D, F in SHAPES[name].products(count):
                        if only and product not in only:
                            continue
                        key = kind, D, F
                        if key not in known:
                            known[key] = side_by_side(run_of(kind, D, F, dtype, count), rounds)
                            took = known[key]
                            ratio = took["numba"] / took["plain"]
                            slow += ratio > MOST
                            ms = [f"{1000 * s:.3f}" for s in took.values()]
                            row = name, dtype, count, f"{product} {D}x{F}", *ms, f"{ratio:.2f}"
                            table.writerow(row)
                            flop = 2 * count * D * F * (1 + (kind == "gated"))
                            rate = [f"{flop / s / 1e9:.0f}" for s in took.values()]
                            print(*row, *rate, "*" * int(ratio > MOST), flush=True)
                        for kernels, s in known[key].items():
                            total[kernels] += s
                    print(name, dtype, count, "all", *(f"{1000 * s:.2f}" for s in total.values()))
    raise SystemExit(slow > 0)


if __name__ == "__main__":
    main()
