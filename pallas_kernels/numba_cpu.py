"""Paged attention on a CPU, compiled by numba, called from inside jit through XLA's FFI.

No compiler is needed on the user's machine: numba brings LLVM. Pages come as pointers to where they
lie, in the plain layout, and nothing is copied. One kernel attends for decodes and for chunks: some
rows of one sequence, one KV head, page after page, with an online softmax (Milakov and Gimelshein,
2018) in float32 whose scores never leave the core's first cache. A page is read once for all query
heads that share its KV head and for all of the rows.

Suffixes are those of ``models/layers.py``; G query heads share a KV head, R rows of a tile.
"""

import functools
import os
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numba as nb
import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

from jaxinfer.pallas_kernels.kv_pages import KVPages
from jaxinfer.pallas_kernels.xla_call import data, dim, handler_of, is_past, pointer, take_after

# Rows of a prompt that go through the pages together.
TILE_ROWS = 32
# Below every score, and what a maximum starts from: exp(MASKED - NO_SCORE) is as good as 0.
MASKED, NO_SCORE = np.float32(-1e30), np.float32(-1e29)
_REGISTERING = threading.Lock()
I64, F32 = ir.IntType(64), ir.FloatType()
_FAST = ("fast",)


# ---- products in registers -----------------------------------------------------------------------
# As vectors, in LLVM's own terms: left to itself, LLVM keeps the sums in memory, since it cannot
# know that they are no part of the pages, and is 4 to 8 times slower.
def _load(builder: Any, address: Any, offset: int, width: int, bits: int) -> Any:
    """``width`` floats at ``address + offset`` bytes, kept there in 32 bits, or 16 as bfloat16."""
    floats = ir.VectorType(F32, width)
    at = builder.add(address, ir.Constant(I64, offset))
    kept = floats if bits == 32 else ir.VectorType(ir.IntType(16), width)
    x = builder.load(builder.inttoptr(at, kept.as_pointer()), align=bits // 8)
    if bits == 32:
        return x
    wide = ir.VectorType(ir.IntType(32), width)
    return builder.bitcast(
        builder.shl(builder.zext(x, wide), ir.Constant(wide, [16] * width)), floats
    )


def _splat(builder: Any, x: Any, width: int) -> Any:
    floats = ir.VectorType(F32, width)
    none = ir.Constant(floats, ir.Undefined)
    one = builder.insert_element(none, x, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), width), [0] * width)
    return builder.shuffle_vector(one, none, zeros)


def _columns(
    builder: Any, weights: Any, matrix: Any, sums: Any, count: Any, width: int, of: "Product"
) -> None:
    """Some columns of a product: a loop over the matrix' rows, all sums in registers."""
    floats = ir.VectorType(F32, width)
    start = [
        _load(builder, sums, g * of.sum_bytes, width, 32)
        if of.add
        else ir.Constant(floats, [0.0] * width)
        for g in range(of.rows)
    ]
    before = builder.block
    loop, done = builder.append_basic_block("loop"), builder.append_basic_block("done")
    builder.cbranch(builder.icmp_signed("<", ir.Constant(I64, 0), count), loop, done)
    builder.position_at_end(loop)
    i = builder.phi(I64)
    i.add_incoming(ir.Constant(I64, 0), before)
    carry = [builder.phi(floats) for _ in range(of.rows)]
    row_at = builder.add(matrix, builder.mul(i, ir.Constant(I64, of.row_bytes)))
    row = _load(builder, row_at, 0, width, of.bits)
    weight_at = builder.add(weights, builder.mul(i, ir.Constant(I64, 4)))
    new = []
    for g in range(of.rows):
        at = builder.add(weight_at, ir.Constant(I64, g * of.weight_bytes))
        weight = _splat(builder, builder.load(builder.inttoptr(at, F32.as_pointer())), width)
        carry[g].add_incoming(start[g], before)
        new.append(builder.fadd(carry[g], builder.fmul(weight, row, flags=_FAST), flags=_FAST))
        carry[g].add_incoming(new[g], loop)
    following = builder.add(i, ir.Constant(I64, 1))
    i.add_incoming(following, loop)
    builder.cbranch(builder.icmp_signed("<", following, count), loop, done)
    builder.position_at_end(done)
    found = [builder.phi(floats) for _ in range(of.rows)]
    for g, out in enumerate(found):
        out.add_incoming(start[g], before)
        out.add_incoming(new[g], loop)
    for g, out in enumerate(found):
        at = builder.add(sums, ir.Constant(I64, g * of.sum_bytes))
        builder.store(out, builder.inttoptr(at, floats.as_pointer()), align=4)


class Product(NamedTuple):
    """A product of a few rows of weights with a matrix, whose sums fit the core's registers.

    Attributes:
        rows: of the weights; ``columns``: of the matrix.
        weight_bytes, row_bytes, sum_bytes: from a row of weights, matrix, sums to the next.
        bits: of the matrix' entries; the others have 32.
        add: to what the sums are already.
    """

    rows: int
    columns: int
    weight_bytes: int
    row_bytes: int
    sum_bytes: int
    bits: int
    add: bool

    def intrinsic(self) -> Any:
        """``run(weights, matrix, sums, count)`` of addresses, over ``count`` rows of the matrix."""
        # Half of the registers at most: 32 of 16 floats, or 16 of 8.
        most = max((256 if _has_avx512() else 64) // self.rows, 1)
        width = next(w for w in (64, 32, 16, 8, 4, 2, 1) if self.columns % w == 0 and w <= most)

        @intrinsic
        def run(typingctx: Any, weights: Any, matrix: Any, sums: Any, count: Any) -> Any:
            def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                w, m, s, n = args
                for c in range(0, self.columns, width):
                    at = builder.add(m, ir.Constant(I64, c * self.bits // 8))
                    _columns(
                        builder, w, at, builder.add(s, ir.Constant(I64, 4 * c)), n, width, self
                    )
                return context.get_dummy_value()

            return types.void(*(types.int64,) * 4), codegen

        return run


@functools.cache
def _has_avx512() -> bool:
    return bool(binding.get_host_cpu_features().get("avx512f"))


@intrinsic
def _power_of_two(typingctx: Any, n: Any) -> Any:
    """2^n of a float that is a whole number; numba's own arithmetic would widen it to 64 bits."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        i32 = ir.IntType(32)
        exponent = builder.add(builder.fptosi(args[0], i32), ir.Constant(i32, 127))
        return builder.bitcast(builder.shl(exponent, ir.Constant(i32, 23)), F32)

    return types.float32(types.float32), codegen


@nb.njit(fastmath=True, inline="always")
def _exp(x: Any) -> Any:
    """exp of float32 <= 0, right to 2 units in the last place (Cephes); -87 at least."""
    x = max(x, np.float32(-87.0))
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    return (p * r * r + r + np.float32(1.0)) * _power_of_two(n)


# ---- the kernel ----------------------------------------------------------------------------------
class Sizes(NamedTuple):
    """What a kernel is compiled for; ``bits`` of KV entries, ``rows`` of a tile at most."""

    K: int
    G: int
    H: int
    B: int
    bits: int
    rows: int

    @property
    def block(self) -> int:
        """Query rows whose scores of a page are computed at once."""
        return min(self.rows * self.G, 8 if _has_avx512() else 4)

    @property
    def padded(self) -> int:
        """Query rows of a tile, in whole blocks."""
        return -(-self.rows * self.G // self.block) * self.block

    @property
    def scratch(self) -> int:
        """Floats: queries, sums, the scores of a block, maximum and total of each row."""
        return 2 * self.padded * self.H + self.block * self.B + 2 * self.padded


def make_tile(sizes: Sizes) -> Callable[..., None]:
    """``tile(q, keys, values, pages, out, scratch, k, row, rows, first, window)``.

    Attention of ``rows`` rows from ``row`` on, at positions from ``first`` on, with KV head ``k``.
    q and out are addresses of float32 [T, K G, H], keys of [P, K, H, B], values of [P, K, B, H],
    pages of int32; a window of 0 is none.
    """
    K, G, H, B, bits, _ = sizes
    block, padded, N = sizes.block, sizes.padded, sizes.K * sizes.G
    head = H * B * bits // 8
    scores_of = Product(block, B, 4 * H, B * bits // 8, 4 * B, bits, False).intrinsic()
    add_values = Product(block, H, 4 * B, H * bits // 8, 4 * H, bits, True).intrinsic()

    @nb.njit(fastmath=True, nogil=True, error_model="numpy", boundscheck=False)
    def tile(
        q_: int, keys: int, values: int, pages: int, out_: int, scratch: int, k: int,
        row: int, rows: int, first: int, window: int,
    ) -> None:  # fmt: skip
        sums_, scores_ = scratch + 4 * padded * H, scratch + 8 * padded * H
        q = nb.carray(pointer(q_, np.float32(0)), (row + rows, N, H))
        out = nb.carray(pointer(out_, np.float32(0)), (row + rows, N, H))
        query = nb.carray(pointer(scratch, np.float32(0)), (padded, H))
        sums = nb.carray(pointer(sums_, np.float32(0)), (padded, H))
        score = nb.carray(pointer(scores_, np.float32(0)), (block, B))
        m = nb.carray(pointer(scores_ + 4 * block * B, np.float32(0)), (2, padded))
        page = nb.carray(pointer(pages, np.int32(0)), 1 << 30)
        used = rows * G
        for v in range(padded):
            m[0, v], m[1, v] = NO_SCORE, np.float32(0)
            for h in range(H):
                query[v, h] = q[row + v // G, k * G + v % G, h] if v < used else np.float32(0)
                sums[v, h] = np.float32(0)
        begin = max(first - window + 1, 0) // B if window > 0 else 0
        for j in range(begin, (first + rows - 1) // B + 1):
            at = (np.int64(page[j]) * K + k) * head
            for b in range(0, used, block):
                last = first + min(b + block - 1, used - 1) // G - j * B
                if last < 0 or (window > 0 and first + b // G - window - j * B >= B - 1):
                    continue
                scores_of(scratch + 4 * H * b, keys + at, scores_, H)
                for i in range(block):
                    # Entries from `low` to `high` of this page are seen.
                    high = first + min(b + i, used - 1) // G - j * B + 1
                    low = high - window if window > 0 else 0
                    for t in range(max(high, 0), B):
                        score[i, t] = MASKED
                    for t in range(0, min(low, B)):
                        score[i, t] = MASKED
                    old = m[0, b + i]
                    top = old
                    for t in range(B):
                        top = max(top, score[i, t])
                    if top > old:
                        shrink = _exp(old - top)
                        for h in range(H):
                            sums[b + i, h] *= shrink
                        m[0, b + i], m[1, b + i] = top, m[1, b + i] * shrink
                    total = np.float32(0)
                    for t in range(B):
                        p = _exp(score[i, t] - top)
                        score[i, t] = p
                        total += p
                    m[1, b + i] += total
                add_values(scores_, values + at, sums_ + 4 * H * b, min(B, last + 1))
        for v in range(used):
            scale = np.float32(1) / max(m[1, v], np.float32(1e-30))
            for h in range(H):
                out[row + v // G, k * G + v % G, h] = sums[v, h] * scale

    return tile


class Target(NamedTuple):
    """A registered handler; its machine code is freed with it."""

    name: str
    handler: Any


def register(sizes: Sizes) -> Target:
    """Compiles a kernel, and tells XLA of it, once. Steps are traced by several threads."""
    with _REGISTERING:
        return _register(sizes)


@functools.cache
def _register(sizes: Sizes) -> Target:
    tile, K, N, H, most = make_tile(sizes), sizes.K, sizes.K * sizes.G, sizes.H, sizes.rows

    @nb.njit(nogil=True, error_model="numpy", boundscheck=False)
    def units(args: int) -> int:
        C = dim(args, 4, 0)
        row = nb.carray(pointer(data(args, 5), np.int32(0)), (C + 1,))
        found = 0
        for c in range(C):
            found += (row[c + 1] - row[c] + most - 1) // most * K
        return found

    @nb.njit(nogil=True, error_model="numpy", boundscheck=False)
    def work(args: int, rets: int, worker: int, shared: int, mine: int) -> None:
        T, M, C = dim(args, 0, 0), dim(args, 3, 1), dim(args, 4, 0)
        start = nb.carray(pointer(data(args, 4), np.int32(0)), (C,))
        row = nb.carray(pointer(data(args, 5), np.int32(0)), (C + 1,))
        window = nb.carray(pointer(data(args, 6), np.int32(0)), (1,))[0]
        scratch = data(rets, 1) + 4 * worker * dim(rets, 1, 1)
        if worker == 0:
            out = nb.carray(pointer(data(rets, 0), np.float32(0)), (T, N * H))
            out[: row[0]] = np.float32(0)
            out[row[C] :] = np.float32(0)
        unit = 0
        for c in range(C):
            for skipped in range(0, row[c + 1] - row[c], most):
                rows = min(most, row[c + 1] - row[c] - skipped)
                for k in range(K):
                    if unit == mine:
                        tile(
                            data(args, 0), data(args, 1), data(args, 2),
                            data(args, 3) + 4 * M * c, data(rets, 0), scratch,
                            k, row[c] + skipped, rows, start[c] + skipped, window,
                        )  # fmt: skip
                        mine = take_after(shared)
                        if is_past(shared, mine):
                            return
                    unit += 1

    handler = handler_of(units, work)
    name = "jaxinfer_attention_" + "_".join(map(str, sizes))
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler.ctypes), platform="cpu")
    return Target(name, handler)


def threads() -> int:
    """How many may attend at once: the processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _attend(
    q_TNH: jax.Array,
    kv: KVPages,
    table_CM: jax.Array,
    start_C: jax.Array,
    row_C1: jax.Array,
    window: int | None,
    rows: int,
) -> jax.Array:
    T, N, H = q_TNH.shape
    _, K, B, _ = kv.values.shape
    sizes = Sizes(K, N // K, H, B, 8 * kv.values.dtype.itemsize, rows)
    shapes = [
        jax.ShapeDtypeStruct(shape, jnp.float32)
        for shape in ((T, N, H), (threads(), sizes.scratch))
    ]
    call = jax.ffi.ffi_call(register(sizes).name, shapes)
    out_TNH, _ = call(
        q_TNH.astype(jnp.float32), kv.keys, kv.values, table_CM, start_C, row_C1,
        np.array([window or 0], np.int32),
    )  # fmt: skip
    return out_TNH


def decode_attention(
    q_SNH: jax.Array,
    kv: KVPages,
    page_table_SM: jax.Array,
    length_S: jax.Array,
    window: int | None = None,
) -> jax.Array:
    """As ``reference.decode_attention``, over entries of float32 or bfloat16."""
    each_S1 = jnp.arange(len(length_S) + 1, dtype=jnp.int32)
    return _attend(q_SNH, kv, page_table_SM, length_S - 1, each_S1, window, 1)


def chunk_attention(
    q_TNH: jax.Array,
    kv: KVPages,
    page_table_CM: jax.Array,
    start_C: jax.Array,
    row_C1: jax.Array,
    window: int | None = None,
) -> jax.Array:
    """As ``reference.chunk_attention``; rows of no chunk give 0."""
    return _attend(q_TNH, kv, page_table_CM, start_C, row_C1, window, TILE_ROWS)
