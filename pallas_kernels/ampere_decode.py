"""Decode for NVIDIA Ampere and Ada in Mosaic GPU: pages by cp.async, products by mma.sync.

It computes the same as ``reference.decode_attention``, but keys are stored like values,
``[K, B, H]``, in 16-bit floats. One warpgroup per sequence, KV head and part of a context goes
through tiles of tokens, in a ring of slots in shared memory. The heads that share a KV head are
rows of one product. A Mosaic kernel also joins the parts, so that Triton is not needed.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxinfer.pallas_kernels.ampere_tiles import (
    ROWS,
    Interpreted,
    OnGpu,
    copy_tile,
    rows,
    shared,
)
from jaxinfer.pallas_kernels.decode_parts import Parts, decode_parts
from jaxinfer.pallas_kernels.gpu_work import Ref
from jaxinfer.pallas_kernels.kv_pages import KVPages
from jaxinfer.pallas_kernels.reference import MASKED, NO_SCORE

# Number of tokens of a tile, and of tiles of keys and of values that shared memory holds.
TILE, SLOTS = 64, 2
# Number of decode programs that an A100 runs at once: two fit into a multiprocessor's shared
# memory.
PROGRAMS = 216
# Each warp copies as many tiles of 8 x 64 entries of a page as the others.
WARPS = 4
LOG2_E = math.log2(math.e)


class Memory(NamedTuple):
    """A program's shared memory: rings of tiles, and weights on their way to the other warps."""

    k: Ref
    v: Ref
    weight: Ref


class Softmax(NamedTuple):
    """An online softmax over the rows.

    Attributes:
        out_RH: values weighted by 2^(score - max).
        max_R: maximum of scores times log2(e).
        sum_R: sum of the weights.
    """

    out_RH: jax.Array
    max_R: jax.Array
    sum_R: jax.Array


def why_not(head_dim: int, group: int, page_size: int, dtype: jnp.dtype) -> str | None:
    """Return why this kernel cannot run, or None; ``group``: query heads per KV head."""
    if not hasattr(plgpu, "mma"):
        return f"jax is {jax.__version__}, Mosaic has no products for these GPUs before 0.11"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"KV entries are {dtype.name}, no 16-bit floats"
    if head_dim % 64 or head_dim > 256:
        return f"head_dim is {head_dim}, no multiple of 64 up to 256"
    if group > ROWS:
        return f"{group} query heads share a KV head, more than {ROWS}"
    if page_size not in (8, 16, 32) and page_size % TILE:
        return f"page_size is {page_size}, neither 8, 16, 32 nor a multiple of {TILE}"
    tiles = min(page_size, TILE) // 8 * (head_dim // 64)
    if tiles % WARPS:
        return (
            f"pages of {page_size} tokens have {tiles} tiles of 8 x 64 entries of heads of "
            f"{head_dim}, no multiple of {WARPS}"
        )
    return None


@partial(jax.jit, static_argnames=("window", "programs", "interpret"))
def decode_attention(
    q_SNH: jax.Array,
    kv: KVPages,
    page_table_SM: jax.Array,
    length_S: jax.Array,
    window: int | None = None,
    programs: int = PROGRAMS,
    interpret: Any = None,
) -> jax.Array:
    """See ``reference.decode_attention``; one program per sequence, KV head and part of its tokens.

    Args:
        programs: number of programs to run at once; contexts are cut into parts to reach it.
        interpret: parameters of Mosaic's interpret mode, to check results on a CPU.
    """
    S, N, H = q_SNH.shape
    K, dtype = kv.values.shape[1], kv.values.dtype
    G = N // K
    how = (Interpreted if interpret else OnGpu)(dtype)
    parts = decode_parts(length_S, window, TILE, K, programs)
    W = len(parts.sequence_W)
    q_SKGH = q_SNH.astype(dtype).reshape(S, K, G, H)
    q_SKRH = jnp.pad(q_SKGH, ((0, 0), (0, 0), (0, ROWS - G), (0, 0)))
    ring = shared((SLOTS, TILE, H), dtype)
    out_WKRH, lse_WKR = plgpu.kernel(
        partial(_decode, how=how, window=window),
        out_type=(
            jax.ShapeDtypeStruct((W, K, ROWS, H), jnp.float32),
            jax.ShapeDtypeStruct((W, K, ROWS), jnp.float32),
        ),
        grid=(W, K),
        grid_names=("part", "head"),
        scratch_types=(Memory(ring, ring, shared((ROWS, TILE), dtype)),),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="paged_decode",
    )(q_SKRH, kv.keys, kv.values, page_table_SM, length_S, *parts[:3])
    out_SKRH = _joined(out_WKRH, lse_WKR, parts, how, interpret)
    return out_SKRH[:, :, :G].reshape(S, N, H)


def _decode(
    q_SKRH: Ref, k_PKBH: Ref, v_PKBH: Ref, table_SM: Ref, length_S: Ref,
    sequence_W: Ref, begin_W: Ref, end_W: Ref, out_WKRH: Ref, lse_WKR: Ref, sm: Memory,
    *, how: OnGpu, window: int | None,
) -> None:  # fmt: skip
    w, h = lax.axis_index("part"), lax.axis_index("head")
    s, begin, end = sequence_W[w], begin_W[w], end_W[w]
    length, lie = length_S[s], how.lie
    # Number of groups of copies for a tile of keys, or of values.
    groups = pl.cdiv(TILE, k_PKBH.shape[2])

    def fetch(tile: jax.Array) -> None:
        slot = lax.rem(tile - begin, SLOTS)
        # The number of groups must be constant, so the last tile is fetched again and not used.
        tile = jnp.minimum(tile, end - 1)
        for x_PKBH, ring in ((k_PKBH, sm.k), (v_PKBH, sm.v)):
            copy_tile(how, x_PKBH, ring.at[slot], table_SM.at[s], h, tile)

    def one_tile(tile: jax.Array, so_far: Softmax, q: jax.Array) -> Softmax:
        slot = lax.rem(tile - begin, SLOTS)
        how.wait((2 * SLOTS - 1) * groups)
        k = how.load(sm.k.at[slot].transpose((1, 0)), lie.right)
        score = how.add_product(how.full((ROWS, TILE), 0), q, k)
        token = how.iota(score.shape, 1, lie.sums) + tile * TILE
        seen = token < length
        if window:
            seen &= token >= length - window
        score = jnp.where(seen, score * LOG2_E, MASKED)
        max_R = jnp.maximum(so_far.max_R, score.max(1))
        weight = jnp.exp2(score - rows(max_R, score))
        shrink_R = jnp.exp2(so_far.max_R - max_R)
        sum_R = so_far.sum_R * shrink_R + weight.sum(1)
        sm.weight[...] = weight.astype(sm.weight.dtype)
        how.wait((2 * SLOTS - 2) * groups)
        v = how.load(sm.v.at[slot], lie.right)
        # Memory for tokens that do not exist may hold NaN, and 0 times NaN is NaN.
        exists = how.iota(v.shape, 0, lie.right) + tile * TILE < length
        v = jnp.where(exists, v, jnp.zeros_like(v))
        out_RH = so_far.out_RH * rows(shrink_R, so_far.out_RH)
        out_RH = how.add_product(out_RH, how.load(sm.weight, lie.left), v)
        fetch(tile + SLOTS)
        return Softmax(out_RH, max_R, sum_R)

    @pl.when(begin < end)
    def _() -> None:
        for ahead in range(SLOTS):
            fetch(begin + ahead)
        q = how.fetch(q_SKRH.at[s, h], lie.left)
        done = lax.fori_loop(begin, end, partial(one_tile, q=q), _nothing(how, q.shape[1]))
        how.wait(0)
        sum_R = jnp.maximum(done.sum_R, 1e-30)
        how.store(out_WKRH.at[w, h], done.out_RH / rows(sum_R, done.out_RH))
        how.store(lse_WKR.at[w, h], done.max_R + jnp.log(sum_R) * LOG2_E)


def _nothing(how: OnGpu, head_dim: int) -> Softmax:
    """Return a softmax over nothing."""
    return Softmax(how.full((ROWS, head_dim), 0), how.full((ROWS,), NO_SCORE), how.full((ROWS,), 0))


def _joined(
    out_WKRH: jax.Array, lse_WKR: jax.Array, parts: Parts, how: OnGpu, interpret: Any
) -> jax.Array:
    """Combine attention to parts into that of sequences [S, K, R, H]; zeros without parts."""
    _, K, R, H = out_WKRH.shape
    S = len(parts.first_S)
    found: jax.Array = plgpu.kernel(
        partial(_join, how=how),
        out_type=jax.ShapeDtypeStruct((S, K, R, H), jnp.float32),
        grid=(S, K),
        grid_names=("sequence", "head"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="paged_join",
    )(out_WKRH, lse_WKR, parts.first_S, parts.count_S)
    return found


def _join(
    out_WKRH: Ref, lse_WKR: Ref, first_S: Ref, count_S: Ref, out_SKRH: Ref, *, how: OnGpu
) -> None:
    s, h = lax.axis_index("sequence"), lax.axis_index("head")
    first, lie = first_S[s], how.lie

    def one(part: jax.Array, so_far: Softmax) -> Softmax:
        lse_R = how.fetch(lse_WKR.at[part, h], lie.of_rows)
        out_RH = how.fetch(out_WKRH.at[part, h], lie.sums)
        max_R = jnp.maximum(so_far.max_R, lse_R)
        shrink_R, weight_R = jnp.exp2(so_far.max_R - max_R), jnp.exp2(lse_R - max_R)
        out_RH = so_far.out_RH * rows(shrink_R, out_RH) + out_RH * rows(weight_R, out_RH)
        return Softmax(out_RH, max_R, so_far.sum_R * shrink_R + weight_R)

    nothing = _nothing(how, out_WKRH.shape[3])
    done = lax.fori_loop(first, first + count_S[s], one, nothing)
    sum_R = jnp.maximum(done.sum_R, 1e-30)
    how.store(out_SKRH.at[s, h], done.out_RH / rows(sum_R, done.out_RH))
