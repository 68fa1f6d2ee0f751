"""The CPU kernels beside plain JAX, on the GPU kernels' cases and on shapes that only CPUs take."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import (
    Shape,
    check_nan_stays,
    chunk_case,
    close,
    decode_case,
    grid,
    pairs,
    plain,
    sampled,
    write_case,
)

from jaxinfer.errors import JaxinferError
from jaxinfer.pallas_kernels import kv_pages, reference
from jaxinfer.pallas_kernels.choice import choose_kernels
from jaxinfer.pallas_kernels.kv_pages import KVPages

pytest.importorskip("numba")
from numba.core.registry import cpu_target

from jaxinfer.pallas_kernels import numba_cpu, numba_matmul, numba_vectors, numba_write, xla_call

ALL = grid(dtype=("float32", "bfloat16"))
# Odd sizes, as small models have them.
ODD = [
    Shape(3, 3, 64, 24, "float32"),
    Shape(2, 5, 8, 3, "bfloat16", 7),
    Shape(1, 1, 20, 5, "float32", 2),
]
# One is compiled for the demo model as well.
FEW = [Shape(3, 3, 64, 16, "float32"), ODD[1]]
MORE = [s for s in (*ODD, *sampled(ALL)) if s not in FEW]
shapes = pytest.mark.parametrize(
    "shape",
    [
        *FEW,
        *(pytest.param(s, marks=pytest.mark.slow) for s in MORE[::2]),
        *(pytest.param(s, marks=pytest.mark.long) for s in MORE[1::2]),
        *(pytest.param(s, marks=pytest.mark.long) for s in pairs(ALL) if s not in FEW + MORE),
    ],
    ids=str,
)


def as_it_lies(kv: KVPages) -> KVPages:
    """Keys by head size, and NaN stays where it is."""
    return kv._replace(keys=jnp.swapaxes(kv.keys, 2, 3))


def attend(of: Any, case: tuple[Any, ...], window: int | None) -> jax.Array:
    q, kv, *rest = case
    return jax.jit(partial(of, window=window))(q, kv, *rest)


@shapes
def test_decodes(shape: Shape) -> None:
    q, kv, *rest = decode_case(shape, seed=0)
    expected = attend(reference.decode_attention, (q, plain(kv), *rest), shape.window)
    got = attend(numba_cpu.decode_attention, (q, as_it_lies(kv), *rest), shape.window)
    assert got.dtype == jnp.float32
    close(got, expected, shape.dtype)
    assert not np.any(got[0])  # A sequence of length 0.


@shapes
def test_chunks(shape: Shape) -> None:
    q, kv, *rest = chunk_case(shape, seed=0)
    first, last = (int(rest[-1][i]) for i in (0, -1))
    expected = attend(reference.chunk_attention, (q, plain(kv), *rest), shape.window)
    got = attend(numba_cpu.chunk_attention, (q, as_it_lies(kv), *rest), shape.window)
    close(got[first:last], expected[first:last], shape.dtype)
    assert not np.any(got[:first])
    assert not np.any(got[last:])


def test_nan_stays_with_its_sequence() -> None:
    attends = numba_cpu.decode_attention, numba_cpu.chunk_attention
    check_nan_stays(*attends, FEW[0], as_it_lies)


@shapes
def test_writes(shape: Shape) -> None:
    """Every page but that of padding has the bits that the plain function leaves there."""
    kv, *rest = write_case(shape, seed=2)
    kv = as_it_lies(kv)
    assert len(rest[0]) % numba_write.TOKENS
    expected = jax.jit(kv_pages.write_kv)(kv, *rest)
    got = jax.jit(numba_write.write_kv)(kv, *rest)
    for ours, theirs, old in zip(got[:2], expected[:2], kv[:2], strict=True):
        assert ours.dtype == jnp.dtype(shape.dtype)
        np.testing.assert_array_equal(ours[1:], theirs[1:])
        assert np.any(ours[1:] != old[1:])


@pytest.mark.parametrize("beyond", [-1, 0, 1])
def test_every_token_of_every_unit_is_written(beyond: int) -> None:
    """Tokens lie without padding behind, up to the edges of units of work, in pages at random."""
    T, (K, _, H, B) = 2 * numba_write.TOKENS + beyond, astuple(FEW[1])[:4]
    rng = np.random.default_rng(0)
    k_TKH, v_TKH = rng.normal(size=(2, T, K, H)).astype(jnp.bfloat16)
    pages = 1 + rng.permutation(-(-T // B)).astype(np.int32)
    kv = KVPages(*(jnp.zeros((len(pages) + 1, K, *x), jnp.bfloat16) for x in ((H, B), (B, H))))
    page_T, offset_T = pages[np.arange(T) // B], np.arange(T, dtype=np.int32) % B
    got = jax.jit(numba_write.write_kv)(kv, k_TKH, v_TKH, page_T, offset_T)
    np.testing.assert_array_equal(np.asarray(got.keys)[page_T, :, :, offset_T], k_TKH)
    np.testing.assert_array_equal(np.asarray(got.values)[page_T, :, offset_T], v_TKH)
    assert np.count_nonzero(got.keys) == np.count_nonzero(k_TKH)


def test_pages_that_are_given_away_are_written_in_place() -> None:
    kv, *rest = write_case(FEW[0], seed=2)
    kv = as_it_lies(kv)
    before = [x.unsafe_buffer_pointer() for x in kv[:2]]
    got = jax.jit(numba_write.write_kv, donate_argnums=0)(kv, *rest)
    assert [x.unsafe_buffer_pointer() for x in got[:2]] == before


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_any_number_of_threads_finds_the_same_bits(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = FEW[0]
    q, kv, *rest = chunk_case(shape, seed=1)
    case = (q, as_it_lies(kv), *rest)
    expected = attend(numba_cpu.chunk_attention, case, None)
    monkeypatch.setattr(numba_cpu, "threads", lambda: threads)
    np.testing.assert_array_equal(attend(numba_cpu.chunk_attention, case, None), expected)


def test_no_unit_of_work_is_left_out_or_waited_for() -> None:
    """Calls from several threads at once, more than the pool has, each with its own result."""
    shape = FEW[0]
    run = jax.jit(numba_cpu.chunk_attention)
    cases = []
    for seed in range(8):
        q, kv, *rest = chunk_case(shape, seed)
        cases.append((q, as_it_lies(kv), *rest))
    expected = [np.asarray(run(*case)) for case in cases]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            for got, right in zip(pool.map(lambda case: run(*case), cases), expected, strict=True):
                np.testing.assert_array_equal(got, right)


def test_a_batch_of_nothing() -> None:
    q, kv, table, start, rows = chunk_case(FEW[0], seed=0)
    case = (q, as_it_lies(kv), table, start, jnp.zeros_like(rows))
    assert not np.any(attend(numba_cpu.chunk_attention, case, None))


@pytest.mark.parametrize("version", ["0.2", "0.6", "1.3"])
def test_a_version_of_the_interface_that_is_not_known(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "xla" / "ffi" / "api"
    folder.mkdir(parents=True)
    major, minor = version.split(".")
    (folder / "c_api.h").write_text(
        f"#define XLA_FFI_API_MAJOR {major}\n#define XLA_FFI_API_MINOR {minor}\n"
    )
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(tmp_path))
    assert xla_call.why_not() == f"XLA's FFI is version {version}, known are 0.3 to 0.5"
    device: Any = SimpleNamespace(platform="cpu")
    case = (device, jnp.dtype("float32"), 64, 3, 16)
    assert choose_kernels("auto", *case) == "plain"
    with pytest.raises(JaxinferError, match="kernels is numba, XLA's FFI is version"):
        choose_kernels("numba", *case)


@pytest.mark.parametrize("text", [None, "#define XLA_FFI_API_VERSION 4\n"])
def test_a_header_that_says_nothing(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = tmp_path / "xla" / "ffi" / "api" / "c_api.h"
    header.parent.mkdir(parents=True)
    if text:
        header.write_text(text)
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(tmp_path))
    why = xla_call.why_not()
    assert why is not None
    assert why.startswith("the version of XLA's FFI is not known: ")
    assert str(header) in why


@pytest.mark.parametrize(
    ("features", "lanes", "pairs"),
    [
        ("", 8, False),
        ("+avx512bf16", 8, False),
        ("-avx512bf16,+avx512f", 16, False),
        ("+avx512bf16,+avx512f", 16, True),
    ],
)
def test_tiles_are_by_what_numba_compiles_for(
    features: str, lanes: int, pairs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles follow NUMBA_CPU_FEATURES; without any, as where LLVM cannot tell, they are small."""
    codegen = cpu_target.target_context.codegen()
    monkeypatch.setattr(codegen, "magic_tuple", lambda: ("", "", features))
    numba_vectors.tiles.cache_clear()
    try:
        assert numba_vectors.tiles().lanes == lanes
        assert numba_matmul.has_pairs(jnp.dtype("bfloat16")) == pairs
    finally:
        numba_vectors.tiles.cache_clear()


def test_the_words_of_the_installed_version() -> None:
    """Pointers and sizes are words, in the order of the structs in the installed header."""
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    api = header.split("struct XLA_FFI_Api {")[1].split("};")[0]
    fields = [line for line in api.splitlines() if "STRUCT_FIELD" in line]
    # Before them: size, extension, three words of a version, a pointer.
    schedule = next(i for i, line in enumerate(fields) if "ThreadPool_Schedule" in line)
    assert 6 + schedule == xla_call.SCHEDULE
    frame = header.split("struct XLA_FFI_CallFrame {")[1].split("};")[0]
    names = [line.split()[-1].rstrip(";") for line in frame.splitlines() if line.endswith(";")]
    assert names[:7] == ["struct_size", "extension_start", "api", "ctx", "stage", "args", "rets"]
    assert (xla_call.API, xla_call.CONTEXT) == (2, 3)
