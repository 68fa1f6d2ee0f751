"""Messages from a channel to its two sides, and their answers.

A side may be another process; see ``processes.messages`` for its clock.
"""

from typing import Any, Literal, NamedTuple

import numpy as np

from jaxinfer.runtime.kv.outcome import End
from jaxinfer.runtime.kv.slab import SlabFormat

TransportName = Literal["device", "host", "transfer_server"]

# Messages to a side, which are handled in this order.


class OpenEnd(NamedTuple):
    """Prepare to send slabs of a stage, or to receive them.

    Attributes:
        end: number that later messages use for this end of a stage pair.
    """

    end: int
    instance: str
    stage: int
    form: SlabFormat
    sends: bool
    verify: bool


class Offer(NamedTuple):
    """Gather a slab from these pages once a step's stage has ended. The answer is Offered.

    Attributes:
        table: pages of the request, in token order; None asks for a slab that both sides know.
        after: event after which the slab is computed, or its name in another process.
    """

    end: int
    slab: int
    table: list[int] | None
    start: int
    stop: int
    after: End | None
    transport: TransportName


class Pull(NamedTuple):
    """Fetch an offered slab. The answer is Pulled.

    Attributes:
        known: whether the slab must be the one that both sides know, which is not kept.
    """

    end: int
    slab: int
    transport: TransportName
    address: Any
    known: bool = False


class Place(NamedTuple):
    """Write a pulled slab to these pages. If slabs are verified, the answer is Checked."""

    end: int
    slab: int
    table: list[int]
    start: int
    stop: int


class Drop(NamedTuple):
    """Forget a slab that was offered or pulled."""

    end: int
    slab: int
    transport: TransportName


# Messages from it.


class Offered(NamedTuple):
    """A slab can be pulled from this address."""

    end: int
    slab: int
    address: Any
    checksum_LT: np.ndarray | None


class Pulled(NamedTuple):
    """A slab has reached the destination's devices; times are those of ``time.perf_counter``."""

    end: int
    slab: int
    began: float
    ended: float


class Checked(NamedTuple):
    """The checksum of a slab's entries, as read from the destination's pages."""

    end: int
    slab: int
    checksum_LT: np.ndarray


class SlabFailed(NamedTuple):
    """A slab failed, by the fault of the source or of the destination."""

    end: int
    slab: int
    by_source: bool
    line: str


SlabMessage = OpenEnd | Offer | Pull | Place | Drop
SlabAnswer = Offered | Pulled | Checked | SlabFailed
