"""Lower each kernel to CUDA for absent GPUs, with the installed jax.

    python -m scripts.kernels.lower_kernels

The program prints a table in markdown, and exits with 1 if anything fails. ``make lower-all`` does
this for several jax versions. Lowering finds shapes and operations that a GPU does not support;
interpreting does not find these.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import click
import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from jaxinfer.pallas_kernels import ampere_decode, generic, grouped, hopper, write
from jaxinfer.pallas_kernels.kv_pages import KVPages

GPUS = {"H100": "NVIDIA H100 80GB HBM3", "A100": "NVIDIA A100-SXM4-80GB", "L4": "NVIDIA L4"}
# Query heads per KV head, head size, and tokens per page.
SHAPES = (
    (1, 64, 16),
    (3, 80, 8),
    (4, 128, 64),
    (7, 96, 32),
    (8, 128, 16),
    (16, 256, 128),
    (5, 112, 256),
    (9, 160, 64),
    (5, 192, 16),
)
S, C, T, M, P = 8, 4, 256, 64, 600
# Number of experts, their sizes, and rows: Mixtral's and Qwen 3's, for decodes and prompts; none of
# them divides evenly.
EXPERTS = ((8, 4096, 14336, 16), (128, 2048, 768, 256), (128, 2048, 768, 32768), (6, 80, 48, 200))


class Variant(NamedTuple):
    """A kernel with its options, its abstract arguments, and the GPUs that it supports."""

    name: str
    run: Callable[..., Any]
    arguments: tuple[Any, ...]
    gpus: tuple[str, ...]


def variants() -> Iterator[Variant]:
    """Yield every kernel in every shape and dtype; every second one has a window.

    Kernels have two KV heads, or one, as when the heads of a stage are spread over several devices.
    """
    for G, H, B, dtype, K, window, name in _cases():
        decode, chunks, written = _arguments(K, G, H, B, dtype)
        everywhere = tuple(gpu for gpu in GPUS if dtype != "float8_e4m3fn" or gpu != "A100")
        for what, run, arguments in (
            ("decode", generic.decode_attention, decode),
            ("chunks", generic.chunk_attention, chunks),
        ):
            yield Variant(
                f"generic {what}: {name}", partial(run, window=window), arguments, everywhere
            )
        yield Variant(f"write: {name}", write.write_kv, written, everywhere)
        if hopper.why_not(H, G, B, jnp.dtype(dtype)):
            continue
        for what, run, arguments in (
            ("decode", hopper.decode_attention, decode),
            ("chunks", hopper.chunk_attention, chunks),
        ):
            yield Variant(
                f"hopper {what}: {name}", partial(run, window=window), arguments, ("H100",)
            )

    yield from _grouped()


def ampere_variants() -> Iterator[Variant]:
    """Yield kernels for devices that must be described in full; Mosaic takes others for an H100."""
    for G, H, B, dtype, K, window, name in _cases():
        if not ampere_decode.why_not(H, G, B, jnp.dtype(dtype)):
            decode, _, _ = _arguments(K, G, H, B, dtype)
            run = partial(ampere_decode.decode_attention, window=window)
            yield Variant(f"ampere decode: {name}", run, decode, ("A100", "L4"))


class _Case(NamedTuple):
    G: int
    H: int
    B: int
    dtype: str
    K: int
    window: int | None
    name: str


def _cases() -> Iterator[_Case]:
    dtypes = "bfloat16", "float16", "float32", "int8", "float8_e4m3fn"
    cases = [*product(SHAPES, dtypes, [2]), *product(SHAPES, ["bfloat16", "int8"], [1])]
    for number, ((G, H, B), dtype, K) in enumerate(cases):
        window = (None, 100)[number % 2]
        said = (", window" if window else "") + (", one KV head" if K == 1 else "")
        yield _Case(G, H, B, dtype, K, window, f"{G} heads of {H}, pages of {B}, {dtype}{said}")


def _grouped() -> Iterator[Variant]:
    for (E, D, F, R), dtype in product(EXPERTS, ("bfloat16", "float32")):
        x_RD, count_E = jax.ShapeDtypeStruct((R, D), dtype), jax.ShapeDtypeStruct((E,), "int32")
        weight_EDF = jax.ShapeDtypeStruct((E, D, F), dtype)
        name = f"{R} rows of {E} experts of {D} x {F}, {dtype}"
        for what, run, weights in (
            ("matmul", grouped.matmul, [weight_EDF]),
            ("gated", grouped.gated, [weight_EDF, weight_EDF]),
        ):
            yield Variant(f"grouped {what}: {name}", run, (x_RD, *weights, count_E), tuple(GPUS))


def _arguments(K: int, G: int, H: int, B: int, dtype: str) -> tuple[Any, Any, Any]:
    """Return the arguments of decode, chunks and write."""

    def of(*shape: int, dtype: str = "int32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    entries: Any = of(P, K, B, H, dtype=dtype)
    scale: Any = of(P, K, dtype="float32") if jnp.dtype(dtype).itemsize == 1 else None
    pages = KVPages(entries, entries, scale, scale)
    q_SNH, q_TNH = (of(rows, K * G, H, dtype="float32") for rows in (S, T))
    new_TKH = of(T, K, H, dtype="float32")
    return (
        (q_SNH, pages, of(S, M), of(S)),
        (q_TNH, pages, of(C, M), of(C), of(C + 1)),
        (pages, new_TKH, new_TKH, of(T), of(T)),
    )


def lower(variant: Variant, gpu: str) -> str:
    """Lower a kernel; return ``yes``, or what is wrong in a few words."""
    try:
        text = lowered(variant, gpu)
    except Exception as error:  # The table shows any error.
        return f"{type(error).__name__}: {error}".splitlines()[0][:80]
    return "yes" if "triton" in text or "mosaic_gpu" in text else "without a kernel"


def lowered(variant: Variant, gpu: str) -> str:
    """Return a kernel lowered to CUDA, as text."""
    device = AbstractDevice(device_kind=GPUS[gpu], num_cores=None, platform="gpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(variant.run).trace(*variant.arguments)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


@click.command()
def main() -> None:
    """Print the table."""
    print(f"| jax {jax.__version__} | {' | '.join(GPUS)} |")
    print("|---|" + "---|" * len(GPUS))
    failed = 0
    for variant in variants():
        found = [lower(variant, gpu) if gpu in variant.gpus else "-" for gpu in GPUS]
        failed += any(how not in ("yes", "-") for how in found)
        print(f"| {variant.name} | {' | '.join(found)} |", flush=True)
    print(f"\n{failed} failed", file=sys.stderr)
    sys.exit(min(failed, 1))


if __name__ == "__main__":
    main()
