"""The decode kernel for Ampere in Mosaic's interpret mode, against the plain function."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu
from kernel_cases import Shape, check_decode, few_fast, grid, sampled

from jaxinfer.pallas_kernels import ampere_decode

pytestmark = pytest.mark.gpu

ON_GPU = jax.default_backend() == "gpu"
InterpretParams = getattr(mosaic_gpu, "InterpretGPUParams", None)
SHAPES = sampled(grid(dtype=("bfloat16", "float16"), H=(64, 128, 192, 256), B=(32, 64, 128)))

if ON_GPU:
    capability = float(getattr(jax.devices()[0], "compute_capability", 0))
    runs = pytest.mark.skipif(not 8 <= capability < 9, reason="needs an sm_80 to sm_89 GPU")
else:
    runs = pytest.mark.skipif(InterpretParams is None, reason="needs jax 0.11: no interpret mode")


def decode() -> Any:
    interpret = None if ON_GPU or InterpretParams is None else InterpretParams(detect_races=True)
    return partial(ampere_decode.decode_attention, interpret=interpret)


@runs
@pytest.mark.parametrize("shape", few_fast(SHAPES), ids=str)
def test_decode(shape: Shape) -> None:
    check_decode(decode(), shape, seed=21)


@pytest.mark.parametrize(
    ("head_dim", "group", "page_size", "dtype", "said"),
    [
        (128, 8, 16, "bfloat16", None),
        (64, 8, 32, "float16", None),
        (192, 8, 32, "bfloat16", None),
        (
            192,
            8,
            16,
            "bfloat16",
            "pages of 16 tokens have 6 tiles of 8 x 64 entries of heads of 192, no multiple of 4",
        ),
        (
            64,
            8,
            16,
            "bfloat16",
            "pages of 16 tokens have 2 tiles of 8 x 64 entries of heads of 64, no multiple of 4",
        ),
        (96, 8, 64, "bfloat16", "head_dim is 96, no multiple of 64 up to 256"),
        (128, 32, 64, "bfloat16", "32 query heads share a KV head, more than 16"),
        (128, 8, 48, "bfloat16", "page_size is 48, neither 8, 16, 32 nor a multiple of 64"),
        (128, 8, 64, "int8", "KV entries are int8, no 16-bit floats"),
    ],
)
def test_what_it_cannot_run(
    monkeypatch: pytest.MonkeyPatch,
    head_dim: int,
    group: int,
    page_size: int,
    dtype: str,
    said: str | None,
) -> None:
    monkeypatch.setattr(mosaic_gpu, "mma", None, raising=False)
    assert ampere_decode.why_not(head_dim, group, page_size, jnp.dtype(dtype)) == said


def test_it_needs_jax_0_11(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mosaic_gpu, "mma", raising=False)
    said = ampere_decode.why_not(128, 8, 64, jnp.dtype("bfloat16"))
    assert said == f"jax is {jax.__version__}, Mosaic has no products for these GPUs before 0.11"
