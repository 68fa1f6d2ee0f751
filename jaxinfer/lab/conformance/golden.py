"""Golden KV entries of a tiny model: each value identifies its owner, in any number format.

A block of 16 channels is a code word. An entry is +-1 or +-1.5 (two bits), times 1, 2 or 4 by its
token, head and layer. Two channels give the code word's unit. The other 28 bits are the number of
the request, layer, keys or values, token, head and block, so that no two blocks are equal. The code
is read from ratios within a block. It therefore survives entries of 8 bits, and a scale from
another page shows as the same code times a number. Powers of two alone would hide a narrower format
on the way; a part of up to 2^-7, which depends on the place, shows it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

BLOCK = 16
_CODE_BITS = 28
# Odd, so that multiplication is one to one, with bits in all places.
_SPREAD = 0x9E3779B1
_UNSPREAD = pow(_SPREAD, -1, 1 << _CODE_BITS)
# Number of tokens that have the same power of two.
_RUN = 8
# Earlier requests of pools have numbers from here on; handed-over requests have smaller ones.
FORMER = 12
MAX_REQUESTS = 16


def check_counts(whose: str, counts: Mapping[str, object], least: int = 1) -> None:
    """Raise ValueError for the first number that is not an integer or is too small."""
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
            raise ValueError(f"{whose}: {name} is {value!r}, must be an integer from {least} on")


class Origin(NamedTuple):
    """Owners of the entries in some blocks; arrays of one shape, -1 for blocks without an owner.

    Attributes:
        unit: number that divides all entries of the block.
    """

    request: np.ndarray
    layer: np.ndarray
    part: np.ndarray
    token: np.ndarray
    head: np.ndarray
    block: np.ndarray
    unit: np.ndarray

    def at(self, key: Any) -> "Origin":
        """Select entries by a mask, or by another numpy key."""
        return Origin._make(x[key] for x in self)


@dataclass(frozen=True)
class GoldenModel:
    """A tiny model's sizes, which define its golden entries.

    Attributes:
        windows: for each layer, how many tokens back it attends; None for all.
    """

    layers: int = 4
    heads: int = 4
    head_dim: int = 16
    windows: tuple[int | None, ...] = ()
    max_tokens: int = 1024

    def __post_init__(self) -> None:
        counts = {f"windows[{n}]": w for n, w in enumerate(self.windows) if w is not None}
        for name in ("layers", "heads", "head_dim", "max_tokens"):
            counts[name] = getattr(self, name)
        check_counts("GoldenModel", counts)
        if self.head_dim % BLOCK:
            raise ValueError(f"head_dim is {self.head_dim}, must be a multiple of {BLOCK}")
        if self.windows and len(self.windows) != self.layers:
            raise ValueError(f"windows has {len(self.windows)} entries for {self.layers} layers")
        if MAX_REQUESTS * math.prod(self._sizes) > 1 << _CODE_BITS:
            raise ValueError("the model has more places than codes: fewer layers, heads or tokens")

    @property
    def _sizes(self) -> tuple[int, ...]:
        return self.layers, 2, self.max_tokens, self.heads, self.head_dim // BLOCK

    def first_needed(self, layer: int, length: int) -> int:
        """Return the first token whose entries the next token still attends to."""
        window = self.windows[layer] if self.windows else None
        return 0 if window is None else max(0, length + 1 - window)

    def entries(
        self, request: int, layer: int, tokens: np.ndarray, heads: np.ndarray
    ) -> np.ndarray:
        """Return float32 [2, T, K, H]: keys and values of some of a request's tokens and heads."""
        part, token, head, block = np.meshgrid(
            np.arange(2), tokens, heads, np.arange(self.head_dim // BLOCK), indexing="ij"
        )
        place = np.ravel_multi_index(
            (np.full_like(part, layer), part, token, head, block), self._sizes
        )
        number = request * np.prod(self._sizes, dtype=np.int64) + place
        code = (number * _SPREAD) % (1 << _CODE_BITS)
        bits = (code[..., None] >> np.arange(_CODE_BITS)) & 1
        # The two channels that identify the unit only have signs.
        sign, half = bits[..., :BLOCK], np.zeros((*code.shape, BLOCK), np.int64)
        half[..., 1], half[..., 2:14] = 1, bits[..., BLOCK:]
        fine = 1 + (number[..., None] * 31 + np.arange(BLOCK) * 7) % 16 / 2048
        unit = self.unit(layer, part, token, head)[..., None]
        found = np.where(sign, -1, 1) * (1 + half / 2) * unit * fine
        return found.reshape(*part.shape[:3], self.head_dim).astype(np.float32)

    def unit(
        self, layer: np.ndarray | int, part: np.ndarray, token: np.ndarray, head: np.ndarray
    ) -> np.ndarray:
        """Return the power of two that divides all entries of a place."""
        mixed = token // _RUN * 5 + head * 3 + np.asarray(layer) * 7 + part
        return 2.0 ** (mixed * 40503 // 64 % 3)

    def origins(self, found: np.ndarray) -> Origin:
        """Read the code words in [..., H], and return their owners as arrays [..., H / 16]."""
        x = found.reshape(*found.shape[:-1], found.shape[-1] // BLOCK, BLOCK)
        with np.errstate(all="ignore"):
            x = x.astype(np.float64)
            unit = np.abs(x[..., 0])
            size = np.abs(x) / unit[..., None]
            half = size > 1.25
            # A pattern that no code word has: other sizes, and other bits in the two channels next
            # to it.
            sound = (unit > 0) & (np.abs(size - np.where(half, 1.5, 1)) < 0.22).all(-1)
        sound &= half[..., 1] & ~half[..., 0] & ~half[..., 14:].any(-1)
        bits = np.concatenate([x < 0, half[..., 2:14]], -1).astype(np.int64)
        code = (bits << np.arange(_CODE_BITS)).sum(-1)
        number = code * _UNSPREAD % (1 << _CODE_BITS)
        request, place = np.divmod(number, np.prod(self._sizes, dtype=np.int64))
        sound &= request < MAX_REQUESTS
        at = np.unravel_index(np.where(sound, place, 0), self._sizes)
        places = [np.where(sound, x, -1) for x in (request, *at)]
        return Origin._make([*places, np.where(sound, unit, 0.0)])
