"""Parts of an engine's step on a CPU, and the time that each part needs.

    python -m scripts.bench.step_parts --dtype float32 --out parts.csv

Two steps of the demo model are measured. One has 56 decodes of 300 entries and 8 chunks of 249
tokens, 2,048 tokens in total. The other has 64 decodes. Each step is run with all parts and with
some parts of its attention left out, in turns. The time of a part is the difference. Each step is
run several times in a row, so that the host works while the device computes. Products are run
alone, in the shapes of the step.

The column "Needs" uses this machine's best rates. All products count at the rate of a large
product. The weights and the live cache entries count at the rate of a sum over more data than a
cache holds. Nothing else should run on the machine.
"""

import csv
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import click
import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxinfer import LLM
from jaxinfer.lab.operators.measure import measure_heads
from jaxinfer.models import layers
from jaxinfer.pallas_kernels.choice import attention
from jaxinfer.pallas_kernels.kv_pages import KVPages
from jaxinfer.runtime.cluster import Engine
from jaxinfer.runtime.profiling.measure_steps import measure_in_a_row
from jaxinfer.runtime.stage.sampler import PLAIN_SAMPLER
from jaxinfer.runtime.stage.stage import Stage
from jaxinfer.runtime.stage.stage_plan import StagePlan
from jaxinfer.runtime.stage.step import CompiledStep
from jaxinfer.steps.times import Part

MODEL = "smollm2-135m-instruct"
ROWS, CONTEXT, CHUNKS, TOKENS = 64, 300, 8, 2048
IN_A_ROW = 3


def steps() -> dict[str, tuple[Part, ...]]:
    """Return the measured steps, as pairs of existing entries and tokens to compute."""
    decodes = ROWS - CHUNKS
    chunks = ((0, (TOKENS - decodes) // CHUNKS),) * CHUNKS
    return {"mixed": ((CONTEXT, 1),) * decodes + chunks, "decodes": ((CONTEXT, 1),) * ROWS}


@dataclass
class Bench:
    """An engine whose step is compiled again with parts left out."""

    engine: Engine
    kernels: str

    @property
    def stage(self) -> Stage:
        """The engine's only stage."""
        (stage,) = self.engine.stages
        assert isinstance(stage, Stage)
        return stage

    def without(self, *parts: str) -> CompiledStep:
        """Return the step, compiled without these parts of attention."""
        whole = attention(self.kernels)
        left = whole._replace(**{part: _nothing(part) for part in parts})
        plan = self.engine.plan
        assert isinstance(plan, StagePlan)
        step = CompiledStep(plan)
        found = layers.attention  # type: ignore[attr-defined]
        layers.attention = lambda kernels: left  # type: ignore[attr-defined]
        try:
            for _ in step.compile_ahead(PLAIN_SAMPLER, lambda key: None):
                pass
        finally:
            layers.attention = found  # type: ignore[attr-defined]
        return step

    def seconds(self, step: CompiledStep, parts: tuple[Part, ...]) -> float:
        """Return the seconds of one step on the device; the host works at the same time."""
        self.stage.step = step
        times = measure_in_a_row(self.engine.worker, self.engine.new_kv(), parts, IN_A_ROW)
        return median(times[1:])


def _nothing(part: str) -> Callable[..., Any]:
    """Return a stand-in for a left-out part that does as little as its result allows."""
    match part:
        case "write":
            return _one_entry
        case "decode" | "chunks":
            return lambda q_TNH, *_: q_TNH.astype(jnp.float32)
    raise AssertionError(part)


def _one_entry(kv: KVPages, k_TKH: jax.Array, v_TKH: jax.Array, *_: Any) -> KVPages:
    """Write one number computed from all keys and values, so that these are still computed."""
    number = (k_TKH.sum() + v_TKH.sum()).astype(kv.values.dtype)
    return kv._replace(values=kv.values.at[0, 0, 0, 0].set(number))


def products(engine: Engine, tokens: int) -> Callable[[], object]:
    """Return a function that computes the products of all layers, and little else."""
    c, dtype = engine.plan.config, engine.plan.options.dtype
    D, F = c.hidden_size, c.intermediate_size
    E, G = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    shapes = [(D, E), (D, G), (D, G), (E, D), (D, F), (D, F), (F, D)]
    random = np.random.default_rng(0)
    weights = [
        [jnp.asarray(random.normal(0, 0.02, shape), dtype) for shape in shapes]
        for _ in range(c.num_hidden_layers)
    ]
    dot = partial(layers.dense, kernels=c.kernels)

    @jax.jit
    def run(x: jax.Array, weights: Sequence[Sequence[jax.Array]]) -> jax.Array:
        for q, k, v, o, gate, up, down in weights:
            x = dot(dot(x, q).at[:, :G].add(dot(x, k) + dot(x, v)), o)
            x = x + dot(dot(x, gate) + dot(x, up), down)
        return x

    x = jnp.asarray(random.normal(0, 1, (tokens, D)), jnp.float32)
    return lambda: run(x, weights).block_until_ready()


def best_product_rate(dtype: str, kernels: str) -> float:
    """Return FLOPs per second of a product with 2,048 rows, by XLA or by the kernels."""
    x = jnp.asarray(np.random.default_rng(0).normal(0, 1, (2048, 2048)), dtype)

    def seconds(of: str) -> float:
        run = jax.jit(partial(layers.dense, kernels=of))
        return best(lambda: run(x, x).block_until_ready())

    return 2 * 2048**3 / min(seconds("plain"), seconds(kernels))


def best_read_rate() -> float:
    """Return bytes per second of a sum over 1 GiB."""
    x = jnp.zeros(2**28, jnp.float32)
    run = jax.jit(lambda x: x.reshape(2, -1).sum(1))
    return x.nbytes / best(lambda: run(x).block_until_ready())


def best(run: Callable[[], object], times: int = 7) -> float:
    """Return the shortest time of a call, in seconds."""
    run()
    found = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return min(found)


def needs(engine: Engine, parts: tuple[Part, ...], flops: float, read: float) -> dict[str, float]:
    """Return the seconds that each part needs at these rates."""
    c = engine.plan.config
    width = jnp.dtype(engine.plan.options.dtype).itemsize
    L, N, K, H = c.num_hidden_layers, c.num_attention_heads, c.num_key_value_heads, c.head_dim
    D, F, V = c.hidden_size, c.intermediate_size, c.vocab_size
    per_layer = 2 * D * N * H + 2 * D * K * H + 3 * D * F
    tokens = sum(count for _, count in parts)
    pairs = sum(count * start + count * (count + 1) / 2 for start, count in parts if count > 1)
    live = sum(start + 1 for start, count in parts if count == 1)
    return {
        "products": max(2 * tokens * L * per_layer / flops, L * per_layer * width / read),
        "prefill attention": 4 * L * N * H * pairs / flops,
        "decode attention": 2 * L * K * H * width * live / read,
        "head and draw": max(2 * len(parts) * D * V / flops, D * V * width / read),
        "writes": 2 * 2 * L * K * H * width * tokens / read,
    }


# Parts of attention that are left out, by the name of the rest.
LEFT_OUT = {
    "all": (),
    "no prefill": ("chunks",),
    "no decode": ("decode",),
    "no write": ("write",),
}


def by_part(
    bench: Bench,
    variants: dict[str, CompiledStep],
    name: str,
    rounds: int,
    rates: tuple[float, float],
) -> list[tuple[str, str, float, float]]:
    """Return the rows of the table: step, part, seconds, and seconds needed."""
    parts = steps()[name]
    took: dict[str, list[float]] = {called: [] for called in variants}
    for _ in range(rounds):
        for called, step in variants.items():
            took[called].append(bench.seconds(step, parts))
    whole = median(took["all"])

    def less(called: str) -> float:
        """Return the median difference within a round, so that other work affects both times."""
        return median(np.subtract(took["all"], took[called]))

    head = measure_heads(bench.engine)[len(parts)]
    found = {
        "products": best(products(bench.engine, sum(count for _, count in parts))),
        "prefill attention": less("no prefill"),
        "decode attention": less("no decode"),
        "head and draw": head,
        "writes": less("no write"),
    }
    if name == "decodes":
        del found["prefill attention"]
    found["rest"] = whole - sum(found.values())
    needed = needs(bench.engine, parts, *rates)
    lines = [(name, part, seconds, needed.get(part, 0.0)) for part, seconds in found.items()]
    return [*lines, (name, "whole step", whole, sum(line[3] for line in lines))]


@click.command()
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32")
@click.option("--kernels", default="plain", show_default=True, help="What attends.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="CSV to add to.")
def main(dtype: str, kernels: str, rounds: int, out: Path) -> None:
    """Print the table of both steps, and add it to a file."""
    rates = best_product_rate(dtype, kernels), best_read_rate()
    llm = LLM(
        MODEL,
        dtype=dtype,
        kernels=kernels,
        max_num_seqs=ROWS,
        max_num_batched_tokens=TOKENS,
        num_pages=400,
        page_size=64,
        max_model_len=1024,
        token_buckets=[ROWS, TOKENS],
        enable_prefix_caching=False,
    )
    engine = llm.engine
    bench = Bench(engine, kernels)
    table = Table("step", "part", "ms", "needs", "times", title=f"{dtype}, jax {jax.__version__}")
    lines = []
    variants = {called: bench.without(*left) for called, left in LEFT_OUT.items()}
    for name in steps():
        for step, part, seconds, needed in by_part(bench, variants, name, rounds, rates):
            lines.append([jax.__version__, dtype, kernels, step, part,
                          f"{1e3 * seconds:.1f}", f"{1e3 * needed:.1f}"])  # fmt: skip
            ratio = f"{seconds / needed:.1f}" if needed else ""
            table.add_row(step, part, f"{1e3 * seconds:.1f}", f"{1e3 * needed:.1f}", ratio)
    Console().print(table)
    click.echo(f"{rates[0] / 1e9:.0f} GFLOP/s, {rates[1] / 1e9:.1f} GB/s")
    new = not out.exists()
    with out.open("a", newline="") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(["jax", "dtype", "kernels", "step", "part", "ms", "needs_ms"])
        writer.writerows(lines)


if __name__ == "__main__":
    main()
