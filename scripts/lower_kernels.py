"""Lower each attention kernel to CUDA for GPUs that are not here, with the jax that is installed.

    python scripts/lower_kernels.py

Prints a table in markdown; ends with 1 if anything fails. ``make lower-all`` does it for a range
of jax versions. Lowering finds what interpreting cannot: shapes and operations that a GPU cannot
have.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from jaxinfer.pallas_kernels import generic, write
from jaxinfer.pallas_kernels.kv_pages import KVPages

GPUS = {"H100": "NVIDIA H100 80GB HBM3", "A100": "NVIDIA A100-SXM4-80GB", "L4": "NVIDIA L4"}
# Query heads per KV head, head size, tokens per page.
SHAPES = ((1, 64, 16), (3, 80, 8), (4, 128, 64), (7, 96, 32), (8, 128, 16), (16, 256, 128))
K, S, C, T, M, P = 2, 8, 4, 256, 64, 600


def variants() -> Iterator[tuple[str, Callable[..., jax.Array], tuple[jax.ShapeDtypeStruct, ...]]]:
    """Each kernel's name, the function, and abstract arguments."""

    def of(shape: tuple[int, ...], dtype: str = "int32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    dtypes, windows = ("bfloat16", "float16", "float32"), (None, 100)
    for (G, H, B), dtype, window in product(SHAPES, dtypes, windows):
        entries = of((P, K, B, H), dtype)
        scale = of((P, K), "float32") if jnp.dtype(dtype).itemsize == 1 else None
        pages = KVPages(entries, entries, scale, scale)
        name = f"{G} heads of {H}, pages of {B}, {dtype}{', window' if window else ''}"
        decode = of((S, K * G, H), "float32"), pages, of((S, M)), of((S,))
        chunks = of((T, K * G, H), "float32"), pages, of((C, M)), of((C,)), of((C + 1,))
        yield f"decode: {name}", partial(generic.decode_attention, window=window), decode
        yield f"chunks: {name}", partial(generic.chunk_attention, window=window), chunks


def lower(
    attend: Callable[..., jax.Array], arguments: tuple[jax.ShapeDtypeStruct, ...], gpu: str
) -> str:
    """How it went, in a word or in the error's first line."""
    device = AbstractDevice(device_kind=GPUS[gpu], num_cores=None, platform="gpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    try:
        with jax.sharding.use_abstract_mesh(mesh):
            traced = jax.jit(attend).trace(*arguments)
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
    except Exception as error:  # Whatever it is, the table has it.
        return f"{type(error).__name__}: {error}".splitlines()[0][:80]
    return "yes" if "triton" in text else "without a kernel"


def main() -> int:
    """Print the table."""
    print(f"| jax {jax.__version__} | {' | '.join(GPUS)} |")
    print("|---|" + "---|" * len(GPUS))
    failed = 0
    for name, attend, arguments in variants():
        found = [lower(attend, arguments, gpu) for gpu in GPUS]
        failed += any(how != "yes" for how in found)
        print(f"| {name} | {' | '.join(found)} |", flush=True)
    print(f"\n{failed} failed", file=sys.stderr)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
