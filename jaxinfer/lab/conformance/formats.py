"""Number formats of KV entries in numpy, which has neither bfloat16 nor floats of 8 bits."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Format:
    """A number format of KV entries.

    Attributes:
        storage: numpy's type of the same size, in which entries are stored.
        largest: for formats with scales, the number to which a page's largest entry is scaled.
        relative: largest change by rounding, as a fraction of the number.
        absolute: largest change by rounding, as a fraction of ``largest``.
    """

    name: str
    storage: np.dtype
    largest: float | None
    relative: float
    absolute: float

    @property
    def scaled(self) -> bool:
        """Tell whether entries are multiplied by a scale."""
        return self.largest is not None


FORMATS = {
    form.name: form
    for form in (
        Format("float32", np.dtype(np.float32), None, 0.0, 0.0),
        Format("float16", np.dtype(np.float16), None, 2.0**-11, 0.0),
        Format("bfloat16", np.dtype(np.uint16), None, 2.0**-8, 0.0),
        Format("int8", np.dtype(np.int8), 127.0, 0.0, 0.5 / 127),
        Format("float8_e4m3fn", np.dtype(np.uint8), 448.0, 2.0**-4, 2.0**-10 / 448),
    )
}


def _e4m3_values() -> np.ndarray:
    """Return float32 [256]: each byte's e4m3fn number (1 sign, 4 exponent, 3 mantissa bits)."""
    byte = np.arange(256)
    sign = np.where(byte & 0x80, -1.0, 1.0)
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    small = mantissa / 8 * 2.0**-6
    values = sign * np.where(exponent > 0, normal, small)
    values[(byte & 0x7F) == 0x7F] = np.nan
    return values.astype(np.float32)


_E4M3 = _e4m3_values()
_POSITIVE = _E4M3[:0x7F]


def encode(numbers: np.ndarray, name: str) -> np.ndarray:
    """Round numbers, which are already divided by their scale, and return them as stored."""
    x = np.asarray(numbers, np.float32)
    if name == "float16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16)
    if name == "bfloat16":
        bits = x.view(np.uint32).astype(np.uint64)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    if name == "int8":
        return np.clip(np.floor(x + 0.5), -127, 127).astype(np.int8)
    if name == "float8_e4m3fn":
        size = np.minimum(np.abs(x), _POSITIVE[-1])
        above = np.searchsorted(_POSITIVE, size).clip(1, len(_POSITIVE) - 1)
        low, high = _POSITIVE[above - 1], _POSITIVE[above]
        # Ties go to the even mantissa, which is also the even byte.
        up = (size - low > high - size) | ((size - low == high - size) & (above % 2 == 0))
        byte = np.where(up, above, above - 1)
        return (byte | np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)
    return x.astype(FORMATS[name].storage)


def decode(stored: np.ndarray, name: str) -> np.ndarray:
    """Return stored numbers as float32, without any scale."""
    if name == "bfloat16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    if name == "float8_e4m3fn":
        return _E4M3[stored]
    return stored.astype(np.float32)
