"""Experts on a CPU or a GPU: grouped products, all experts for all tokens, and ragged_dot.

    python -m scripts.bench.experts
    python -m scripts.bench.experts --tokens 1,8 --ragged
    python -m scripts.bench.experts --devices 8 --layouts expert_parallel,megatron
    python -m scripts.bench.experts --model qwen3-30b-a3b --json experts.json

The benchmark measures one layer. By default, it has 64 experts of 1,024 x 512, and 8 of them per
token. Figures are medians in milliseconds, of rounds in which the functions take turns. Results are
compared with each other. Further columns have the weights that our products read and the operations
that they do per second, and the machine's load.

``--ragged`` adds ``jax.lax.ragged_dot``, which takes seconds for many tokens on a CPU.
``--devices`` is a number of CPU devices, on one axis.
"""

import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import click
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxinfer.lab.sharding.expert_products import RAGGED
from jaxinfer.models.experts import all_experts, likeliest
from jaxinfer.models.grouped_experts import Route, experts_on_mesh, sorted_experts
from jaxinfer.models.layouts import LAYOUTS
from jaxinfer.models.sharding import shard
from jaxinfer.pallas_kernels.choice import grouped
from scripts.tables import Row, show_table

# Number of experts, their sizes, and the number of experts per token.
MODELS = {
    "small": (64, 1024, 512, 8),
    "qwen3-30b-a3b": (128, 2048, 768, 8),
    "mixtral-8x7b": (8, 4096, 14336, 2),
}
WEIGHTS = "gate_EDF", "up_EDF", "down_EFD"
# Tolerance relative to the largest value, by dtype of the weights: the version with all experts
# rounds its rows to that dtype.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}


def layers(
    ragged: bool, dtype: jnp.dtype, route: Route, sizes: tuple[int, int], layout: str | None
) -> dict[str, Callable[..., jax.Array]]:
    """Return compiled layers by name, as functions of x, logits and weights.

    Args:
        sizes: D and F of an expert on one device.
        layout: layout of the current mesh; None without a mesh.
    """
    kernels = "numba" if jax.default_backend() == "cpu" else "generic"
    ours = grouped(kernels, dtype, *sizes)
    assert ours

    def routed(layer: Callable[..., jax.Array], **options: Any) -> Callable[..., jax.Array]:
        return jax.jit(lambda x_TD, logit, *rest: layer(x_TD, *route(logit), *rest, **options))

    if layout:
        laid = LAYOUTS[layout]
        on_mesh = partial(experts_on_mesh, route=route, products=ours, layout=laid)
        return {"all experts": routed(all_experts, layout=laid), "ours": jax.jit(on_mesh)}
    found = {"all experts": routed(all_experts)}
    for name, products in {"ours": ours, "ragged_dot": RAGGED}.items():
        if ragged or products is ours:
            found[name] = routed(sorted_experts, products=products)
    return found


def inputs(
    tokens: int, dtype: jnp.dtype, model: str, mesh: Mesh | None, layout: str | None
) -> tuple[jax.Array, ...]:
    """Return random rows, logits of the router, and weights placed as in the layout."""
    E, D, F, _ = MODELS[model]
    keys = jax.random.split(jax.random.key(0), 5)
    x_TD = jax.random.normal(keys[0], (tokens, D))
    logit_TE = jax.random.normal(keys[1], (tokens, E))
    weights = []
    for key, name in zip(keys[2:], WEIGHTS, strict=True):
        size = (E, D, F) if name != "down_EFD" else (E, F, D)
        weight = (jax.random.normal(key, size, dtype) * size[1] ** -0.5).astype(dtype)
        if mesh and layout:
            where = shard(f"layers.0.mlp.{name}", size, mesh, LAYOUTS[layout])
            weight = jax.device_put(weight, where)
        weights.append(weight)
    return (x_TD, logit_TE, *weights)


def milliseconds(
    runs: Mapping[str, Callable[..., jax.Array]], given: tuple[jax.Array, ...], rounds: int
) -> dict[str, float]:
    """Return medians of compiled runs, which take turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run(*given).block_until_ready()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(found) for name, found in times.items()}


def check(found: Mapping[str, jax.Array], dtype: str) -> None:
    """Compare all results with the result of all experts for all tokens."""
    right = np.asarray(found["all experts"])
    for name, result in found.items():
        error = np.abs(np.asarray(result) - right).max() / np.abs(right).max()
        if not error < TOLERANCE[dtype]:
            raise click.ClickException(f"{name}: off by {error:.1e} of the largest value")


@click.command()
@click.option("--tokens", default="1,8,64,512", help="Tokens of a step, several with commas.")
@click.option("--rounds", default=7)
@click.option("--ragged", is_flag=True)
@click.option("--model", type=click.Choice(list(MODELS)), default="small")
@click.option("--dtypes", default=",".join(TOLERANCE), help="Of weights, several with commas.")
@click.option("--devices", default=1, help="Of a CPU, as a mesh of one axis.")
@click.option("--layouts", default="expert_parallel,megatron", help="Of the mesh.")
@click.option("--json", "json_path", help="File for the figures.")
def main(
    tokens: str,
    rounds: int,
    ragged: bool,
    model: str,
    dtypes: str,
    devices: int,
    layouts: str,
    json_path: str | None,
) -> None:
    """Print a table."""
    if devices > 1:
        jax.config.update("jax_num_cpu_devices", devices)
    mesh = Mesh(np.array(jax.devices()[:devices]), ("tp",)) if devices > 1 else None
    rows: list[Row] = []
    for layout in layouts.split(",") if mesh else [None]:
        for dtype in dtypes.split(","):
            for count in map(int, tokens.split(",")):
                with jax.set_mesh(mesh) if mesh else nullcontext():
                    rows.append(measured(count, dtype, model, rounds, ragged, mesh, layout))
    show_table(rows)
    if json_path:
        Path(json_path).write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


def measured(
    count: int,
    dtype: str,
    model: str,
    rounds: int,
    ragged: bool,
    mesh: Mesh | None,
    layout: str | None,
) -> Row:
    """Return the row of the table for ``count`` tokens."""
    given = inputs(count, jnp.dtype(dtype), model, mesh, layout)
    _, D, F, per_token = MODELS[model]
    columns = given[2].sharding.shard_shape(given[2].shape)[2]
    route = partial(likeliest, count=per_token, normalised=True)
    runs = layers(ragged, jnp.dtype(dtype), route, (D, columns), layout)
    check({name: run(*given) for name, run in runs.items()}, dtype)
    took = milliseconds(runs, given, rounds)
    touched = len(np.unique(route(given[1])[1])) * 3 * D * F * given[2].dtype.itemsize
    return (
        {"layout": layout or "one device", "weights": dtype, "tokens": count}
        | {f"{name}, ms": round(ms, 2) for name, ms in took.items()}
        | {
            "all / ours": round(took["all experts"] / took["ours"], 1),
            "GB/s": round(touched / took["ours"] / 1e6, 1),
            "TFLOP/s": round(6 * count * per_token * D * F / took["ours"] / 1e9, 3),
            "load": round(os.getloadavg()[0], 1),
        }
    )


if __name__ == "__main__":
    main()
