"""Experts in blocks of rows: DeepGEMM's contiguous layout, of which dense products tell the time.

The rows of each expert begin a block. How many experts have any is not known on the host, so that
vLLM computes as many blocks as there can be, the empty ones with the first expert's weights: for
few tokens nearly a block for each expert that a device has, whatever the router says. The first
block of an expert waits for its weights; they are at hand for the others.
"""

import numpy as np

from jaxinfer.hardware.catalogue import ModelShape
from jaxinfer.simulate.published.files import Card
from jaxinfer.simulate.published.products import Curve, ProductTimes, without_scaling

BLOCK = 128
_TOKENS = tuple(2**power for power in range(15))
# The activation, and those that spread rows over blocks and gather them.
_LAUNCHES = 7


def most_rows(tokens: float, model: ModelShape, experts: int) -> float:
    """Largest number of rows in the blocks that these tokens fill, by experts on a device."""
    rows = tokens * model.num_experts_per_tok + experts * (BLOCK - 1)
    return -(-rows // BLOCK) * BLOCK


def block_times(
    products: ProductTimes,
    plain: ProductTimes,
    card: Card,
    model: ModelShape,
    divided: int,
    ways: int,
    vectors: bool,
) -> dict[float, float]:
    """Microseconds of a layer's experts, by tokens.

    A token is quantized once, before its rows are spread, so that the first product's own
    quantization is taken off; the second one's stays.

    Args:
        products, plain: products with scales of blocks, and in bfloat16.
        divided: devices that share each expert; ``ways``: ways that experts are shared whole.
        vectors: whether what is no product counts.
    """
    h, each = model.hidden_size, model.intermediate_size // divided
    wide = (1 + model.gated) * each
    both = (
        (without_scaling(products, plain, wide, h), wide * h),
        (products.curve(h, each), h * each),
    )
    found = {}
    for tokens in _TOKENS:
        rows = most_rows(tokens, model, model.num_experts // ways)
        experts = model.experts_read(tokens) / ways
        seconds = sum(
            _product_s(_of_rows(curve, rows) * 1e-3, experts, rows, weights / card.bandwidth)
            for curve, weights in both
        )
        if vectors:
            seconds += _vectors_s(
                card, rows * (wide + each), tokens * model.num_experts_per_tok * h
            )
        found[float(tokens)] = 1e6 * seconds
    return found


def _of_rows(curve: Curve, rows: float) -> float:
    """Milliseconds of a number of rows; beyond the most, on a line through the last and half of it.

    There they never fall.
    """
    m = sorted(curve)
    if rows <= m[-1]:
        return float(np.interp(rows, m, [curve[each] for each in m]))
    half = next(each for each in m if 2 * each >= m[-1])
    if curve[m[-1]] < curve[half]:
        return curve[m[-1]]
    return curve[half] + (curve[m[-1]] - curve[half]) * (rows - half) / (m[-1] - half)


def _product_s(seconds: float, experts: float, rows: float, read_s: float) -> float:
    """Seconds of a product of so many rows, whose experts' weights take ``read_s`` each to read."""
    first = min(experts * BLOCK / rows, 1.0)
    return max(first * seconds, experts * read_s) + (1 - first) * seconds


def _vectors_s(card: Card, inner: float, spread: float) -> float:
    """Seconds of what is no product, by numbers of the activation and of tokens' rows.

    These are quantized, counted by expert, spread in two launches beside ids of blocks that begin
    as zeros, and gathered: written and read in 8 bits, and read again in 16.
    """
    return _LAUNCHES * card.launch_s + (inner * 2 + spread * (1 + 1 + 2)) / card.bandwidth
