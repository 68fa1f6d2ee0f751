"""Requests of a stage's process to the process of its FFN group."""

from concurrent.futures import Future
from typing import NamedTuple

import jax
import numpy as np

from jaxinfer.runtime.spread.lender_client import LenderClient


class ComputeFfn(NamedTuple):
    """Compute one layer's FFN. The answer is its output [T, D] for the same tokens.

    Attributes:
        tokens: bucket of the step or of its micro-batch.
        x_TD: inputs of the tokens without padding.
    """

    layer: int
    tokens: int
    x_TD: np.ndarray


class FfnClient(LenderClient):
    """Requests the FFN of layers from the process of an FFN group."""

    part = "FFN"

    def compute(self, layer: int, x_TD: jax.Array, count: int) -> "Future[np.ndarray]":
        """Wait for the inputs of the first ``count`` tokens, then request a layer's FFN of them."""
        return self._ask(ComputeFfn(layer, len(x_TD), np.asarray(x_TD)[:count]))
