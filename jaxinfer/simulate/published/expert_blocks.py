"""Experts in blocks of rows (DeepGEMM's contiguous layout), timed by dense products.

The rows of each expert begin a new block. The host does not know how many experts have rows, so
vLLM computes as many blocks as there could be, and uses the first expert's weights for empty ones.
With few tokens, it computes almost one block per expert on the device, whatever the router chooses.
The first block of an expert waits for its weights; later blocks find them in cache.
"""

import numpy as np

from jaxinfer.hardware.catalogue import ModelShape
from jaxinfer.simulate.published.files import Card
from jaxinfer.simulate.published.products import Curve, ProductTimes, without_scaling

BLOCK = 128
_TOKENS = tuple(2**power for power in range(15))
# The activation, and the operators that spread rows over blocks and gather them.
_LAUNCHES = 7


def most_rows(tokens: float, model: ModelShape, experts: int) -> float:
    """Return the most rows that the blocks of a device with ``experts`` experts can have."""
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
    """Return microseconds of a layer's experts, by tokens.

    A token is quantized once, before its rows are spread. The time to quantize is therefore
    subtracted from the first product, but not from the second one.

    Args:
        products: products with block scales.
        plain: products in bfloat16.
        divided: number of devices that share each expert.
        ways: number of parts into which whole experts are divided.
        vectors: whether to include operators other than products.
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
    """Return milliseconds of a number of rows, which never fall beyond the last point.

    Beyond it they follow the line through the last point and half of it.
    """
    m = sorted(curve)
    if rows <= m[-1]:
        return float(np.interp(rows, m, [curve[each] for each in m]))
    half = next(each for each in m if 2 * each >= m[-1])
    if curve[m[-1]] < curve[half]:
        return curve[m[-1]]
    return curve[half] + (curve[m[-1]] - curve[half]) * (rows - half) / (m[-1] - half)


def _product_s(seconds: float, experts: float, rows: float, read_s: float) -> float:
    """Return seconds of a product of ``rows`` rows.

    Reading an expert's weights takes ``read_s``.
    """
    first = min(experts * BLOCK / rows, 1.0)
    return max(first * seconds, experts * read_s) + (1 - first) * seconds


def _vectors_s(card: Card, inner: float, spread: float) -> float:
    """Return seconds of all work except products, from numbers of activations and of tokens' rows.

    Tokens are quantized, counted by expert, spread in two launches, and gathered. Block ids are set
    to zero first. Numbers are written and read in 8 bits, and read again in 16.
    """
    return _LAUNCHES * card.launch_s + (inner * 2 + spread * (1 + 1 + 2)) / card.bandwidth
