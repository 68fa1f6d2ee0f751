"""Corrects measured attention that the cards' numbers rule out."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxinfer.errors import JaxinferError
from jaxinfer.simulate.published.columns import MeasuredPoints, NoRowsError
from jaxinfer.simulate.published.files import Card

# Reads the same table of a card.
ReadTable = Callable[[Card], MeasuredPoints]


@dataclass(frozen=True)
class AttentionSize:
    """A model's attention on each GPU.

    Attributes:
        queries: number of query heads.
        head_size: dimension of a head.
        entry_bytes: bytes of a KV entry, over all KV heads.
        full: share of the layers that have no window.
    """

    queries: int
    head_size: int
    entry_bytes: int
    full: float


def possible_chunks(
    chunks: MeasuredPoints, read: ReadTable, others: Sequence[Card], of: AttentionSize, card: Card
) -> MeasuredPoints:
    """Return times of prompts' attention with which a card stays below its peak FLOPs.

    If ``chunks`` do not, those of another card with the same peak take their place.

    Args:
        others: other cards that have the table.

    Raises:
        JaxinferError: the table of no card with the same peak stays below it.
    """
    if _is_computed(chunks, of, card.flops):
        return chunks
    for each in others:
        if each.flops == card.flops and _is_computed(found := read(each), of, card.flops):
            return found
    raise JaxinferError(
        f"{chunks.path}: prompts take less than the card's peak FLOPs allow, and no card of the "
        "folder has the same peak and another table: take another version, or "
        "possible_attention: false"
    )


def possible_decodes(
    decodes: MeasuredPoints, read: ReadTable, others: Sequence[Card], of: AttentionSize, card: Card
) -> tuple[MeasuredPoints, list[Path]]:
    """Return times of decodes' attention that the cards' bandwidths allow.

    If a table exceeds the peak bandwidth anywhere, its decodes take at least the time to read their
    KV at the rate that operators on vectors reach. A card is at least as fast as one with the same
    peak FLOPs and no more bandwidth.

    Args:
        others: other cards that have the table.

    Returns:
        The times, and the other cards' tables from which some of them are.
    """
    ms, used = decodes.ms, []
    if not _is_read(decodes, of, card):
        ms = np.maximum(ms, 1e3 * _read_bytes(decodes, of) / card.bandwidth)
    for each in others:
        if each.flops != card.flops or each.peak_bandwidth > card.peak_bandwidth:
            continue
        with suppress(NoRowsError):  # It may lack these heads.
            if _is_read(found := read(each), of, each):
                times = found.by_point()
                theirs = np.array([times.get(at, np.inf) for at in decodes.by_point()])
                if (theirs < ms).any():
                    ms = np.minimum(ms, theirs)
                    used.append(found.path)
    return MeasuredPoints(decodes.path, decodes.points, ms), used


def _is_computed(chunks: MeasuredPoints, of: AttentionSize, flops: float) -> bool:
    """Tell whether prompts stay below the peak, at 4 FLOPs per pair and number."""
    batch, length, _ = chunks.points.T
    pairs = of.full * batch * length * (length + 1) / 2
    return bool((chunks.ms * 1e-3 >= 4 * pairs * of.queries * of.head_size / flops).all())


def _is_read(decodes: MeasuredPoints, of: AttentionSize, card: Card) -> bool:
    """Tell whether decodes stay below the memory's peak."""
    return bool((decodes.ms * 1e-3 >= _read_bytes(decodes, of) / card.peak_bandwidth).all())


def _read_bytes(decodes: MeasuredPoints, of: AttentionSize) -> np.ndarray:
    """Return the bytes of KV that a layer without a window reads, as a mean over all layers."""
    batch, length, step = decodes.points.T
    read: np.ndarray = of.full * of.entry_bytes * batch * (length + step)
    return read
