"""The kernels for Hopper, in Mosaic's interpret mode, against the plain functions."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu
from kernel_cases import (
    RARE,
    Shape,
    check_chunks,
    check_decode,
    chunk_case,
    close,
    decode_case,
    few_fast,
    grid,
    pairs,
    plain,
    sampled,
)

from jaxinfer.pallas_kernels import hopper, reference
from jaxinfer.pallas_kernels.kv_pages import KVPages

pytestmark = pytest.mark.gpu

ON_GPU = jax.default_backend() == "gpu"
InterpretParams = getattr(mosaic_gpu, "InterpretGPUParams", None)
SHAPES = grid(dtype=("bfloat16", "float16"))
EIGHT_BITS = sampled(grid(dtype=("int8", "float8_e4m3fn"), H=(64, 96, 128, 256), B=(64, 128)))
RARE_SHAPES = sampled(grid(**RARE, dtype=("bfloat16", "float16")))

if ON_GPU:
    capability = getattr(jax.devices()[0], "compute_capability", "")
    runs = pytest.mark.skipif(capability != "9.0", reason="needs an sm_90 GPU")
else:
    runs = pytest.mark.skipif(InterpretParams is None, reason="needs jax 0.11: no interpret mode")


def interpreted(detect_races: bool = False) -> Any:
    return None if ON_GPU or InterpretParams is None else InterpretParams(detect_races=detect_races)


DECODE = partial(hopper.decode_attention, interpret=interpreted())
CHUNKS = partial(hopper.chunk_attention, interpret=interpreted())


@runs
@pytest.mark.parametrize("shape", sampled(SHAPES), ids=str)
def test_decode(shape: Shape) -> None:
    check_decode(DECODE, shape, seed=1)


@pytest.mark.parametrize(
    ("dtype", "S", "K", "quicker"),
    [
        ("int8", 64, 8, "generic"),
        ("float8_e4m3fn", 33, 8, "generic"),
        ("int8", 32, 8, "hopper"),
        ("bfloat16", 64, 8, "hopper"),
    ],
)
def test_the_quicker_decode(
    monkeypatch: pytest.MonkeyPatch, dtype: str, S: int, K: int, quicker: str
) -> None:
    """264 programs of heads of 128 fit on an H100: more sequences than 33 fill it uncut."""
    for module, name in ((hopper, "hopper"), (hopper.generic, "generic")):
        said = lambda *_, name=name: name  # noqa: E731
        monkeypatch.setattr(module, "decode_attention", said)
    pages = KVPages(*[jax.ShapeDtypeStruct((5, K, 64, 128), jnp.dtype(dtype))] * 2)
    q_SNH = np.zeros((S, 4 * K, 128), np.float32)
    assert hopper.decode(q_SNH, pages, None, None) == quicker


@runs
@pytest.mark.parametrize("shape", sampled(SHAPES), ids=str)
def test_chunks(shape: Shape) -> None:
    check_chunks(CHUNKS, shape, seed=2)


@runs
@pytest.mark.slow
@pytest.mark.parametrize("shape", pairs(SHAPES), ids=str)
def test_every_pair_of_values(shape: Shape) -> None:
    check_decode(DECODE, shape, seed=3)
    check_chunks(CHUNKS, shape, seed=4)


@runs
@pytest.mark.parametrize("shape", few_fast(RARE_SHAPES), ids=str)
def test_what_few_models_have(shape: Shape) -> None:
    check_decode(DECODE, shape, seed=8)
    check_chunks(CHUNKS, shape, seed=9)


@runs
@pytest.mark.parametrize("shape", few_fast(EIGHT_BITS), ids=str)
def test_entries_of_8_bits(shape: Shape) -> None:
    check_decode(DECODE, shape, seed=10)
    check_chunks(CHUNKS, shape, seed=11)


@runs
@pytest.mark.skipif(ON_GPU, reason="of the interpreter")
@pytest.mark.parametrize(
    "shape",
    [
        Shape(1, 4, 64, 16, "bfloat16"),
        Shape(1, 3, 256, 128, "bfloat16", window=100),
        pytest.param(Shape(1, 4, 64, 64, "int8"), marks=pytest.mark.slow),
        pytest.param(Shape(1, 2, 256, 128, "int8", window=100), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_warpgroups_do_not_race(shape: Shape) -> None:
    """Reads of shared memory come after the writes that they need; a race raises."""
    params = interpreted(detect_races=True)
    for attend, case in (
        (hopper.decode_attention, decode_case(shape, 0)),
        (hopper.chunk_attention, chunk_case(shape, 0)),
    ):
        jax.block_until_ready(jax.jit(partial(attend, interpret=params))(*case))


@pytest.mark.parametrize(
    ("head_dim", "group", "page_size", "dtype", "reason"),
    [
        (128, 4, 64, "bfloat16", None),
        (80, 64, 8, "float16", None),
        (256, 1, 256, "bfloat16", None),
        (128, 4, 64, "int8", None),
        (96, 4, 128, "float8_e4m3fn", None),
        (128, 4, 64, "float32", "KV entries are float32"),
        (80, 4, 64, "int8", "head_dim is 80, no multiple of 32"),
        (128, 4, 32, "int8", "page_size is 32, neither 64 nor"),
        (72, 4, 64, "bfloat16", "head_dim is 72"),
        (512, 4, 64, "bfloat16", "head_dim is 512"),
        (128, 71, 64, "bfloat16", "71 query heads share a KV head"),
        (128, 4, 24, "bfloat16", "page_size is 24"),
        (128, 4, 4, "bfloat16", "page_size is 4"),
        (128, 4, 192, "bfloat16", "page_size is 192"),
    ],
)
def test_what_they_cannot(
    head_dim: int, group: int, page_size: int, dtype: str, reason: str | None
) -> None:
    found = hopper.why_not(head_dim, group, page_size, jnp.dtype(dtype))
    assert (found is None) if reason is None else reason in (found or "")


def test_pages_beyond_the_table_are_not_asked_for() -> None:
    """A table of one page of 8 tokens, a tile of 64."""
    if not ON_GPU and InterpretParams is None:
        pytest.skip("needs jax 0.11: no interpret mode")
    rng = np.random.default_rng(0)
    kv = KVPages(*(jnp.asarray(rng.normal(size=(3, 1, 8, 64)), jnp.bfloat16) for _ in "kv"))
    q = jnp.asarray(rng.normal(size=(2, 2, 64)) / 8, jnp.float32)
    rest = jnp.array([[1], [2]]), jnp.array([8, 3])
    got = jax.jit(partial(hopper.decode_attention, interpret=interpreted()))(q, kv, *rest)
    close(got, jax.jit(reference.decode_attention)(q, plain(kv), *rest), "bfloat16")
