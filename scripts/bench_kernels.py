"""Attention kernels on a GPU, side by side in one run, as shares of what the machine can do.

    python scripts/bench_kernels.py --json figures.json
    python scripts/bench_kernels.py --json figures.json --rehearse   # on a CPU: small, interpreted

bfloat16, 32 query and 8 KV heads of 128. Decodes: batches of 64 x 4,096 and 4 x 65,536 tokens of
context, as a share of the measured copy bandwidth (keys and values are read once). Chunked prefill:
2,048 new tokens after 8,192, as a share of the measured rate of matrix products. Beside them, the
plain functions, jax's own paged decode where it runs, and ``jax.nn.dot_product_attention`` (cuDNN)
on the same data laid out contiguously. Medians of rounds in which the functions take turns.
"""

import json
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click
import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.pallas_kernels import generic, reference

N, K, H, B = 32, 8, 128, 64
Run = Callable[[], jax.Array]


def seconds(runs: Mapping[str, Run], rounds: int) -> dict[str, float]:
    """Medians; a run's first call compiles and does not count."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        jax.block_until_ready(run())
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(found) for name, found in times.items()}


def pool(rng: np.random.Generator, sequences: int, length: int) -> tuple[Any, ...]:
    """Pages in random order, the table, and the same keys and values laid out contiguously."""
    M = -(-length // B)
    table = 1 + rng.permutation(sequences * M).reshape(sequences, M).astype(np.int32)
    keys = jax.random.split(jax.random.key(0), 2)
    sizes = (sequences * M + 1, K, H, B), (sequences * M + 1, K, B, H)
    k, v = (
        jax.random.normal(key, size, jnp.bfloat16) for key, size in zip(keys, sizes, strict=True)
    )
    k_SLKH = k[table].transpose(0, 1, 4, 2, 3).reshape(sequences, M * B, K, H)
    v_SLKH = v[table].transpose(0, 1, 3, 2, 4).reshape(sequences, M * B, K, H)
    return k, v, jnp.asarray(table), k_SLKH, v_SLKH


def decode_runs(sequences: int, length: int, interpret: bool) -> dict[str, Run]:
    """One step of decodes."""
    k, v, table, k_SLKH, v_SLKH = pool(np.random.default_rng(0), sequences, length)
    q = jax.random.normal(jax.random.key(1), (sequences, N, H), jnp.bfloat16) * H**-0.5
    lengths = jnp.full((sequences,), length, jnp.int32)
    ours = jax.jit(partial(generic.decode_attention, interpret=interpret))
    plain = jax.jit(reference.decode_attention)
    dense = jax.jit(lambda q, k, v: jax.nn.dot_product_attention(q[:, None], k, v, scale=1.0))
    runs: dict[str, Run] = {
        "ours": lambda: ours(q, k, v, table, lengths),
        "plain": lambda: plain(q, k, v, table, lengths),
        "contiguous": lambda: dense(q, k_SLKH, v_SLKH),
    }
    if not interpret:
        from jax.experimental.pallas.ops.gpu import paged_attention as shipped

        k_KPBH, v_KPBH = k.transpose(1, 0, 3, 2), v.transpose(1, 0, 2, 3)
        theirs = jax.jit(shipped.paged_attention)
        runs["jax's"] = lambda: theirs(q, k_KPBH, v_KPBH, table, lengths)
    return runs


def chunk_runs(new: int, before: int, interpret: bool) -> dict[str, Run]:
    """One chunk of a prompt."""
    k, v, table, k_SLKH, v_SLKH = pool(np.random.default_rng(0), 1, before + new)
    q = jax.random.normal(jax.random.key(1), (new, N, H), jnp.bfloat16) * H**-0.5
    start, rows = jnp.array([before], jnp.int32), jnp.array([0, new], jnp.int32)
    ours = jax.jit(partial(generic.chunk_attention, interpret=interpret))
    plain = jax.jit(reference.chunk_attention)
    seen = jnp.arange(before + new)[None, :] <= before + jnp.arange(new)[:, None]
    length = before + new
    dense = jax.jit(
        lambda q, k, v: jax.nn.dot_product_attention(
            q[None], k[:, :length], v[:, :length], mask=seen[None, None], scale=1.0
        )
    )
    return {
        "ours": lambda: ours(q, k, v, table, start, rows),
        "plain": lambda: plain(q, k, v, table, start, rows),
        "contiguous": lambda: dense(q, k_SLKH, v_SLKH),
    }


def machine(size: int, rounds: int) -> tuple[float, float]:
    """Bytes per second of a copy, read and written; FLOPs per second of bfloat16 products."""
    x = jnp.ones((size, size), jnp.bfloat16)
    add = jax.jit(lambda x: x + 1)
    product = jax.jit(lambda x: x @ x)
    found = seconds({"copy": lambda: add(x), "product": lambda: product(x)}, rounds)
    return 2 * x.nbytes / found["copy"], 2 * size**3 / found["product"]


@click.command()
@click.option("--json", "json_path", required=True, help="File for the figures.")
@click.option("--rounds", default=20)
@click.option("--rehearse", is_flag=True, help="Small, and interpreted: on a CPU.")
def main(json_path: str, rounds: int, rehearse: bool) -> None:
    """Measure, print and write."""
    scale, rounds = (64, 1) if rehearse else (1, rounds)
    copied, multiplied = machine(8192 // (16 if rehearse else 1), rounds)
    cases: dict[str, tuple[dict[str, Run], float]] = {}
    for sequences, length in ((64, 4096 // scale), (4, 65536 // scale)):
        sequences = max(sequences // scale, 2)
        least = sequences * length * 2 * K * H * 2 / copied
        cases[f"decode {sequences} x {length}"] = decode_runs(sequences, length, rehearse), least
    new, before = 2048 // scale, 8192 // scale
    pairs = new * before + new * (new + 1) / 2
    cases[f"chunk {new} after {before}"] = (
        chunk_runs(new, before, rehearse), 4 * N * H * pairs / multiplied
    )  # fmt: skip
    figures: dict[str, Any] = {
        "jax": jax.__version__, "device": jax.devices()[0].device_kind, "rehearsed": rehearse,
        "copy_gb_s": copied / 1e9, "product_tflops": multiplied / 1e12, "cases": {},
    }  # fmt: skip
    for name, (runs, least) in cases.items():
        found = seconds(runs, rounds)
        figures["cases"][name] = {
            how: {"seconds": took, "of_the_machine": least / took} for how, took in found.items()
        }
        for how, took in found.items():
            print(f"{name}: {how}: {1000 * took:.3f} ms, {least / took:.0%} of the machine's rate")
    Path(json_path).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
