"""How a stage's process uses a pool of KV heads that another process lends.

Data travels from process to process through host memory and a socket: tables once per step, and for
each layer the pairs and the results of attention.
"""

from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxinfer.runtime.kv.sockets import Address
from jaxinfer.runtime.spread.lender_client import LenderClient
from jaxinfer.steps.shapes import StepShape

# Number of steps, or halves of steps, that may be in flight, and a few more.
MOST_BEGUN = 8


class Begin(NamedTuple):
    """Set a step's tables, see ``spread_inputs.pack``. There is no answer."""

    step: int
    pairs: StepShape
    tables: np.ndarray


class BegunStep(NamedTuple):
    """A step whose tables have been sent: its number, and its number of pairs without padding."""

    step: int
    num_pairs: int


class Attend(NamedTuple):
    """Compute one layer's attention. The answer is the results [R, G, H] of the same pairs.

    Attributes:
        piece_RXH: the pairs without padding.
    """

    step: int
    layer: int
    piece_RXH: np.ndarray


class Take(NamedTuple):
    """Read pages. The answer is all layers' ``KVPages``, see ``slice_move.take``."""

    page_C: np.ndarray


class Put(NamedTuple):
    """Write pages. The answer is 0 when they are written."""

    pages: Any
    page_C: np.ndarray


class PoolClient(LenderClient):
    """Requests attention and pages from the process of an attention group."""

    part = "attention"

    def __init__(self, address: Address, group: str, patience: float | None = None) -> None:
        super().__init__(address, group, patience)
        self._steps = 0

    def begin(self, pairs: StepShape, tables: np.ndarray, num_pairs: int) -> BegunStep:
        """Send a step's tables; ``num_pairs`` is its number of pairs without padding."""
        self._steps += 1
        self._send(Begin(self._steps, pairs, tables))
        return BegunStep(self._steps, num_pairs)

    def attend(self, begun: BegunStep, layer: int, piece_RXH: jax.Array) -> "Future[np.ndarray]":
        """Request one layer's attention; wait until ``piece_RXH`` has been computed.

        Args:
            piece_RXH: queries, keys and values of the step's pairs of a row and a KV head.

        Returns:
            The results [R, G, H] of the pairs without padding.
        """
        return self._ask(Attend(begun.step, layer, np.asarray(piece_RXH)[: begun.num_pairs]))

    def take(self, page_C: np.ndarray) -> "Future[Any]":
        """Request the contents of pages, at most one chunk."""
        return self._ask(Take(page_C))

    def put(self, pages: Any, page_C: np.ndarray) -> "Future[int]":
        """Write pages, which may be on a device of this process; wait until they are computed.

        Args:
            page_C: numbers of the pages to write; further ``pages`` are padding, and are not sent.
        """
        return self._ask(Put(jax.tree.map(lambda x: np.asarray(x)[: len(page_C)], pages), page_C))
