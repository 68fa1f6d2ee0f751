"""Vectors of numba's kernels in registers: products of a few rows, and exponentials.

Products of vectors are written in LLVM's own terms. LLVM would otherwise keep the sums in memory,
because it cannot know that they are not part of the matrix, and be 4 to 8 times slower.
"""

import functools
from typing import Any, NamedTuple

import numba as nb
import numpy as np
from llvmlite import ir
from numba import types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

I8, I32, I64, F32 = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
_FAST, _ONE = ("fast",), ir.Constant(I64, 1)
# Factor for an fp8 (e4m3) number that was read as a half: their exponents' biases are 7 and 15.
FP8_UNIT = 2.0**8


def has(feature: str) -> bool:
    """Tell whether numba compiles for processors with this feature, by LLVM's name for it."""
    return f"+{feature}" in cpu_target.target_context.codegen().magic_tuple()[2].split(",")


class TileSizes(NamedTuple):
    """Tile sizes of the kernels, chosen for a processor's registers.

    Attributes:
        lanes: number of floats in a register.
        sums: largest number of registers with sums, three quarters of all.
        attention: number of query rows whose scores of a page are computed at once.
        matmul: largest number of rows of a product's tile.
        logits: largest number of rows of a tile of logits.
        scaled: largest number of rows of a tile with scaled weights read in place.
        grouped: numbers of rows of tiles of experts' products, the largest first.
        panel: number of a weight's floats that a product packs; 0 for none.
        vectors: largest number of registers of a row of a product's tile; whole cache lines.
        in_place: pairs of the largest number of rows and of bytes for which a weight is read in
            place.
    """

    lanes: int
    sums: int
    attention: int
    matmul: int
    logits: int
    scaled: int
    grouped: tuple[int, ...]
    panel: int
    vectors: int
    in_place: tuple[tuple[int, int], ...]


@functools.cache
def tiles() -> TileSizes:
    """Return tile sizes for 32 registers of 16 floats, or for 16 registers of 8.

    A panel fills half of a core's second-level cache.
    """
    if has("avx512f"):
        return TileSizes(16, 24, 8, 8, 8, 6, (6, 3, 2, 1), 2**17, 3, ((64, 2**23),))
    return TileSizes(8, 12, 4, 6, 4, 3, (3, 2, 1), 2**16, 4, ((64, 2**21), (16, 2**22 - 1)))


def lanes() -> int:
    """Return the number of floats in a register."""
    return tiles().lanes


class RowProduct(NamedTuple):
    """A product of some rows of weights with a matrix.

    Attributes:
        rows: number of rows of the weights.
        columns: number of columns of the matrix.
        bits: bits of the matrix' entries, float32, bfloat16 or of 8 bits; weights and sums have 32.
        add: whether to add to the present sums.
        carry: whether to continue from the present sums.
        prefetch: number of cache lines of 64 bytes for each row of the matrix.
        is_float: whether entries of 8 bits are fp8 (e4m3), each in units of ``FP8_UNIT``; otherwise
            int8.
        pairs: whether weights are pairs of bfloat16, in 32 bits. The matrix' entries are pairs,
            too, or have 16 or 8 bits, so that two rows of the matrix count as one.
    """

    rows: int
    columns: int
    bits: int
    add: bool = False
    prefetch: int = 0
    is_float: bool = False
    pairs: bool = False
    carry: bool = False

    @property
    def width(self) -> int:
        """Number of floats in a vector."""
        return next(w for w in (16, 8, 4, 2, 1) if self.columns % w == 0 and w <= lanes())

    @property
    def vectors(self) -> int:
        """Number of a row's vectors that are summed at once: at most three quarters of the
        registers.
        """
        most = max(tiles().sums // self.rows, 1)
        whole = self.columns // self.width
        return max(v for v in range(1, min(most, whole) + 1) if whole % v == 0)

    def intrinsic(self) -> Any:
        """Return ``run``, which multiplies rows of the matrix by weights.

        Its arguments are ``weights, weight_bytes, matrix, row_bytes, sums, sum_bytes, count, ahead,
        ahead_bytes, slowness``.

        It goes over ``count`` rows of the matrix, given addresses and the bytes from one row to the
        next. ``ahead`` is the address of the first 64 bytes to prefetch, and advances every
        ``2^slowness`` rows.
        """

        @intrinsic
        def run(
            typingctx: Any,
            weights: Any,
            weight_bytes: Any,
            matrix: Any,
            row_bytes: Any,
            sums: Any,
            sum_bytes: Any,
            count: Any,
            ahead: Any,
            ahead_bytes: Any,
            slowness: Any,
        ) -> Any:
            def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                w, weight_by, m, by, s, sum_by, n, *far = args
                for c in range(0, self.columns, self.vectors * self.width):
                    at = _plus(builder, m, c * self.bits // 8)
                    of = self if c == 0 else self._replace(prefetch=0)
                    loop = _Loop(builder, of, weight_by, by, n, *far)
                    loop.run(w, at, _plus(builder, s, 4 * c), sum_by)
                return context.get_dummy_value()

            return types.void(*(types.int64,) * 10), codegen

        return run

    def packed(self) -> Any:
        """Return ``run(matrix, row_bytes, to)``, which copies one row as float32 or two
        as pairs.
        """

        @intrinsic
        def run(typingctx: Any, matrix: Any, row_bytes: Any, to: Any) -> Any:
            def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                loop = _Loop(builder, self, *[None] * 6)
                for c in range(0, self.columns, self.width):
                    at = _plus(builder, args[0], c * self.bits // 8)
                    x = loop.paired(at, args[1]) if self.pairs else loop.floats(at, self.bits)
                    to = builder.inttoptr(_plus(builder, args[2], 4 * c), x.type.as_pointer())
                    builder.store(x, to, align=4)
                return context.get_dummy_value()

            return types.void(*(types.int64,) * 3), codegen

        return run


def _plus(builder: Any, address: Any, offset: int) -> Any:
    return builder.add(address, ir.Constant(I64, offset))


class _Loop(NamedTuple):
    """Writes the loop over the matrix' rows for as many columns as registers can sum."""

    builder: Any
    of: RowProduct
    weight_bytes: Any
    row_bytes: Any
    count: Any
    ahead: Any
    ahead_bytes: Any
    slowness: Any

    def run(self, weights: Any, matrix: Any, sums: Any, sum_bytes: Any) -> None:
        """Compute all sums, once."""
        b, cells = self.builder, range(self.of.rows * self.of.vectors)
        floats = ir.VectorType(F32, self.of.width)
        at = [self._sum_at(sums, sum_bytes, cell) for cell in cells]
        zero = ir.Constant(floats, [0.0] * self.of.width)
        start = [self.floats(where, 32) if self.of.carry else zero for where in at]
        before = b.block
        loop, done = b.append_basic_block("loop"), b.append_basic_block("done")
        b.cbranch(b.icmp_signed("<", ir.Constant(I64, 0), self.count), loop, done)
        b.position_at_end(loop)
        i = b.phi(I64)
        carry = [b.phi(floats) for _ in cells]
        new = self._row(i, carry, weights, matrix)
        following = _plus(b, i, 1)
        i.add_incoming(ir.Constant(I64, 0), before)
        i.add_incoming(following, loop)
        b.cbranch(b.icmp_signed("<", following, self.count), loop, done)
        b.position_at_end(done)
        found = [b.phi(floats) for _ in cells]
        for cell in cells:
            for phi in (carry[cell], found[cell]):
                phi.add_incoming(start[cell], before)
                phi.add_incoming(new[cell], loop)
        for total, where in zip(found, at, strict=True):
            # Added last, so that the existing value is rounded once.
            out = b.fadd(total, self.floats(where, 32), flags=_FAST) if self.of.add else total
            b.store(out, b.inttoptr(where, floats.as_pointer()), align=4)

    def _sum_at(self, sums: Any, sum_bytes: Any, cell: int) -> Any:
        row, vector = divmod(cell, self.of.vectors)
        down = self.builder.mul(sum_bytes, ir.Constant(I64, row))
        return _plus(self.builder, self.builder.add(sums, down), 4 * self.of.width * vector)

    def _row(self, i: Any, carry: list[Any], weights: Any, matrix: Any) -> list[Any]:
        """Return the sums with row ``i`` of the matrix added."""
        b, of = self.builder, self.of
        down = b.mul(i, self.row_bytes)
        if of.prefetch:
            far = b.add(self.ahead, b.mul(b.lshr(i, self.slowness), self.ahead_bytes))
            rows = [far, b.add(far, b.lshr(self.ahead_bytes, _ONE))]
            for each in rows if of.pairs and of.bits < 32 else rows[:1]:
                for line in range(of.prefetch):
                    self._prefetch(_plus(b, each, 64 * line))
        at, each = b.add(matrix, down), of.width * of.bits // 8
        row = [self._entries(_plus(b, at, each * v)) for v in range(of.vectors)]
        weights_at, new = b.add(weights, b.mul(i, ir.Constant(I64, 4))), []
        for r in range(of.rows):
            weight_at = b.add(weights_at, b.mul(self.weight_bytes, ir.Constant(I64, r)))
            kind = I32 if of.pairs else F32
            weight = self._splat(b.load(b.inttoptr(weight_at, kind.as_pointer())))
            new += [self._add(carry[r * of.vectors + v], weight, x) for v, x in enumerate(row)]
        return new

    def _entries(self, address: Any) -> Any:
        """Return a vector of the matrix' entries."""
        if not self.of.pairs:
            return self.floats(address, self.of.bits)
        if self.of.bits < 32:
            return self.paired(address, self.builder.lshr(self.row_bytes, _ONE))
        vector = ir.VectorType(I32, self.of.width)
        return self.builder.load(self.builder.inttoptr(address, vector.as_pointer()), align=4)

    def paired(self, rows: Any, row_bytes: Any) -> Any:
        """Return entries of two rows as pairs, the first row in the lower bits.

        None needs rounding.
        """
        b, wide = self.builder, ir.VectorType(I32, self.of.width)
        half, upper = (ir.Constant(wide, [x] * self.of.width) for x in (16, -0x10000))
        first, second = (
            b.bitcast(self.floats(at, self.of.bits), wide) for at in (rows, b.add(rows, row_bytes))
        )
        return b.or_(b.lshr(first, half), b.and_(second, upper))

    def _add(self, total: Any, weight: Any, entries: Any) -> Any:
        """Return a vector of sums with further products added."""
        b = self.builder
        if not self.of.pairs:
            return b.fadd(total, b.fmul(weight, entries, flags=_FAST), flags=_FAST)
        # For LLVM, vectors of 32 bfloat16; it casts the given ones.
        wanted = ir.FunctionType(total.type, [total.type, weight.type, entries.type])
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        found = b.module.globals.get(name) or ir.Function(b.module, wanted, name)
        return b.call(found, [total, weight, entries])

    def _prefetch(self, address: Any) -> None:
        """Prefetch for reading, into the second-level cache."""
        pointer = I8.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32])
        prefetch = self.builder.module.declare_intrinsic("llvm.prefetch", (pointer,), kind)
        at = self.builder.inttoptr(address, pointer)
        self.builder.call(prefetch, [at, *(ir.Constant(I32, x) for x in (0, 2, 1))])

    def floats(self, address: Any, bits: int) -> Any:
        """Return a vector stored in 32 bits, in 16 as bfloat16, or in 8."""
        b, width = self.builder, self.of.width
        if bits == 8:
            return self._of_8_bits(address)
        floats, wide = ir.VectorType(F32, width), ir.VectorType(I32, width)
        kept = floats if bits == 32 else ir.VectorType(ir.IntType(16), width)
        x = b.load(b.inttoptr(address, kept.as_pointer()), align=bits // 8)
        if bits == 32:
            return x
        return b.bitcast(b.shl(b.zext(x, wide), ir.Constant(wide, [16] * width)), floats)

    def _of_8_bits(self, address: Any) -> Any:
        """Return a vector of int8, or of fp8, which are halves with exponents that are 8
        too small.
        """
        b, width = self.builder, self.of.width
        floats, half = ir.VectorType(F32, width), ir.VectorType(ir.IntType(16), width)
        x = b.load(b.inttoptr(address, ir.VectorType(I8, width).as_pointer()), align=1)
        if not self.of.is_float:
            return b.sitofp(b.sext(x, ir.VectorType(I32, width)), floats)
        # Sign, 4 bits of exponent and 3 of fraction; a half has 5 and 10.
        wide = b.shl(b.sext(x, half), ir.Constant(half, [7] * width))
        kept = b.and_(wide, ir.Constant(half, [0xBFFF - 0x10000] * width))
        return b.fpext(b.bitcast(kept, ir.VectorType(ir.HalfType(), width)), floats)

    def _splat(self, x: Any) -> Any:
        b, width = self.builder, self.of.width
        none = ir.Constant(ir.VectorType(x.type, width), ir.Undefined)
        one = b.insert_element(none, x, ir.Constant(I32, 0))
        return b.shuffle_vector(one, none, ir.Constant(ir.VectorType(I32, width), [0] * width))


@intrinsic
def _power_of_two(typingctx: Any, n: Any) -> Any:
    """Return 2^n of a whole number in a float; numba's own arithmetic would widen it to 64 bits."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        exponent = builder.add(builder.fptosi(args[0], I32), ir.Constant(I32, 127))
        return builder.bitcast(builder.shl(exponent, ir.Constant(I32, 23)), F32)

    return types.float32(types.float32), codegen


@nb.njit(inline="always")
def exp(x: Any) -> Any:
    """Return exp of float32 <= 0, correct to 2 units in the last place (Cephes); -87 at least."""
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


@nb.njit(inline="always")
def silu(x: Any) -> Any:
    """Return x / (1 + exp(-x)) of float32."""
    e = exp(-abs(x))
    return x * (np.float32(1.0) if x >= 0 else e) / (np.float32(1.0) + e)
