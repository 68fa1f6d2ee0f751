"""Layout of chunks' queries and results for the Hopper kernel."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxinfer.pallas_kernels.hopper_tiles import CONSUMERS, ROWS
from jaxinfer.pallas_kernels.reference import work_items

# A copy by TMA begins at a multiple of this number of rows of queries, and has at least as many.
COPIED = 8


class Fit(NamedTuple):
    """The tokens that make up a tile's rows.

    Attributes:
        heads: number of heads of a token, with padding.
        unit: number of tokens at whose multiples a copy can begin.
        tokens: number of tokens of a tile, a multiple of ``unit``.
    """

    heads: int
    unit: int
    tokens: int


def tile_rows(group: int) -> Fit:
    """Choose the padding of heads with which a tile holds the most tokens."""

    def fit(heads: int) -> Fit:
        unit = COPIED // math.gcd(COPIED, heads)
        return Fit(heads, unit, CONSUMERS * ROWS // heads // unit * unit)

    return max(map(fit, range(group, group + COPIED)), key=lambda fit: (fit.tokens, -fit.heads))


class QueryLayout(NamedTuple):
    """Places of queries and results: Y tokens, where each chunk begins at a unit.

    Attributes:
        begin_C: where each chunk begins.
        token_Y: token at each place; any token for padding.
        place_T: place of each token; -1 for a row without a chunk.
    """

    begin_C: jax.Array
    token_Y: jax.Array
    place_T: jax.Array


def layout(row_C1: jax.Array, T: int, fit: Fit) -> QueryLayout:
    """Place the chunks; they need little more room than their tokens, whatever their number."""
    size_C = row_C1[1:] - row_C1[:-1]
    taken_C = pl.cdiv(size_C, fit.unit) * fit.unit
    # At worst, each chunk ends with a partly filled unit, and the last tile reaches beyond its end.
    Y = T + min(len(size_C), T) * (fit.unit - 1) + fit.tokens + COPIED
    Y = pl.cdiv(Y, COPIED) * COPIED
    chunk_Y, index_Y, _ = work_items(taken_C, Y)
    token_Y = row_C1[chunk_Y] + index_Y
    to_Y = jnp.where(index_Y < size_C[chunk_Y], token_Y, T)
    place_T = jnp.full(T, -1).at[to_Y].set(jnp.arange(Y), mode="drop")
    found = QueryLayout(jnp.cumsum(taken_C) - taken_C, jnp.minimum(token_Y, T - 1), place_T)
    # Computed once per step; XLA would find a row's place again for each element that a layer
    # gathers.
    return jax.lax.optimization_barrier(found)
