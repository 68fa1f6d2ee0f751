"""Experts on a CPU: grouped products beside all experts for all tokens, and beside ragged_dot.

    python -m scripts.bench.experts
    python -m scripts.bench.experts --tokens 1,8 --ragged

One layer of 64 experts of 1,024 x 512, 8 per token. Medians of rounds in which the functions take
turns, in milliseconds; results are compared, and the machine's load stands beside them.
``--ragged`` has ``jax.lax.ragged_dot`` take part, which takes seconds for many tokens.
"""

import os
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial

import click
import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models.experts import all_experts, likeliest, sorted_experts
from jaxinfer.pallas_kernels.choice import Grouped, grouped
from scripts.tables import show_table

E, D, F, PER_TOKEN = 64, 1024, 512, 8
# Of the largest value, by the dtype of weights: all experts round their rows to it.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}


def ragged_matmul(x_RD: jax.Array, weight_EDF: jax.Array, count_E: jax.Array) -> jax.Array:
    """Products by XLA, in the weights' dtype."""
    x_RD = x_RD.astype(weight_EDF.dtype)
    return jax.lax.ragged_dot(x_RD, weight_EDF, count_E, preferred_element_type=jnp.float32)


def ragged_gated(
    x_RD: jax.Array, gate_EDF: jax.Array, up_EDF: jax.Array, count_E: jax.Array
) -> jax.Array:
    """Compute both products by XLA, and the gate."""
    gate_RF, up_RF = (ragged_matmul(x_RD, weight, count_E) for weight in (gate_EDF, up_EDF))
    return jax.nn.silu(gate_RF) * up_RF


RAGGED = Grouped(ragged_matmul, ragged_gated)


def layers(ragged: bool, dtype: jnp.dtype) -> dict[str, Callable[..., jax.Array]]:
    """The layers by name, compiled when they are called: of x, shares, experts, weights."""
    found: dict[str, Callable[..., jax.Array]] = {"all experts": jax.jit(all_experts)}
    ours = grouped("numba", dtype)
    assert ours
    for name, products in {"ours": ours, "ragged_dot": RAGGED}.items():
        if ragged or products is ours:
            found[name] = jax.jit(partial(sorted_experts, products=products))
    return found


def inputs(tokens: int, dtype: jnp.dtype) -> tuple[jax.Array, ...]:
    """Rows, their shares and experts, and weights, all random."""
    keys = jax.random.split(jax.random.key(0), 5)
    x_TD = jax.random.normal(keys[0], (tokens, D))
    routed = likeliest(jax.random.normal(keys[1], (tokens, E)), PER_TOKEN, True)
    sizes = (E, D, F), (E, D, F), (E, F, D)
    weights = (
        (jax.random.normal(key, size) * size[1] ** -0.5).astype(dtype)
        for key, size in zip(keys[2:], sizes, strict=True)
    )
    return (x_TD, *routed, *weights)


def milliseconds(
    runs: Mapping[str, Callable[..., jax.Array]], given: tuple[jax.Array, ...], rounds: int
) -> dict[str, float]:
    """Medians of runs that have been compiled, which take turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run(*given).block_until_ready()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(found) for name, found in times.items()}


def check(found: Mapping[str, jax.Array], dtype: str) -> None:
    """Compare all results with all experts'."""
    right = np.asarray(found["all experts"])
    for name, result in found.items():
        error = np.abs(np.asarray(result) - right).max() / np.abs(right).max()
        if not error < TOLERANCE[dtype]:
            raise click.ClickException(f"{name}: off by {error:.1e} of the largest value")


@click.command()
@click.option("--tokens", default="1,8,64,512", help="Tokens of a step, several with commas.")
@click.option("--rounds", default=7)
@click.option("--ragged", is_flag=True)
def main(tokens: str, rounds: int, ragged: bool) -> None:
    """Print a table."""
    rows = []
    for dtype in TOLERANCE:
        for count in map(int, tokens.split(",")):
            runs, given = layers(ragged, jnp.dtype(dtype)), inputs(count, jnp.dtype(dtype))
            check({name: run(*given) for name, run in runs.items()}, dtype)
            took = milliseconds(runs, given, rounds)
            rows.append(
                {"weights": dtype, "tokens": count}
                | {f"{name}, ms": round(ms, 1) for name, ms in took.items()}
                | {"all / ours": round(took["all experts"] / took["ours"], 1)}
                | {"load": round(os.getloadavg()[0], 1)}
            )
    show_table(rows)


if __name__ == "__main__":
    main()
