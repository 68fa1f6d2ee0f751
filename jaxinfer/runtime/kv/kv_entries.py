"""Reads KV entries from pages to the host, and bounds how far a hand-off may change them."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from jaxinfer.pallas_kernels.choice import keys_by_token
from jaxinfer.pallas_kernels.kv_pages import LARGEST
from jaxinfer.runtime.kv.slab import SLAB_TOKENS
from jaxinfer.runtime.stage.stage import Stage

# The largest error of entries of 8 bits is half a step of their scale. Steps are equal for int8.
# For e4m3, they grow with numbers above the smallest one, 2^-9.
_HALF_STEP = {"int8": (0.5, 0.0), "float8_e4m3fn": (2.0**-10, 2.0**-4)}
# The rounding error of float32 in products and quotients of a scale.
_FLOAT32 = 4e-7


def read_entries(
    stages: Sequence[Stage], tables: Sequence[Sequence[int]], count: int
) -> np.ndarray:
    """Return keys and values of a request's first ``count`` tokens, float32 [L, 2, T, K, H].

    Args:
        tables: for each stage, the request's pages in token order.
    """
    found = []
    for stage, table in zip(stages, tables, strict=True):
        plan = stage.plan
        page, offset = np.divmod(np.arange(count), plan.limits.page_size)
        page = np.asarray(table)[page]
        heads = slice(plan.num_kv_heads)
        for kv in stage.kv:
            keys, values = (np.asarray(x).astype(np.float32) for x in (kv.keys, kv.values))
            by_token = keys_by_token(plan.config.kernels)
            k_TKH = keys[page, heads, offset] if by_token else keys[page, heads, :, offset]
            v_TKH = values[page, heads, offset]
            if kv.key_scale_PK is not None and kv.value_scale_PK is not None:
                k_TKH = k_TKH * np.asarray(kv.key_scale_PK)[page, heads, None]
                v_TKH = v_TKH * np.asarray(kv.value_scale_PK)[page, heads, None]
            found.append(np.stack([k_TKH, v_TKH]))
    return np.stack(found)


def allowed_change(
    sent: np.ndarray, wire: np.dtype, stored: np.dtype, page_size: int
) -> np.ndarray:
    """Return how much each received entry may differ from the sent one, given the number formats.

    Args:
        sent: [L, 2, T, K, H], as held by the source.
        wire: format in which entries are sent.
        stored: format of the destination.
        page_size: tokens per page of the destination.
    """
    travels = sent.astype(wire).astype(np.float32)
    if stored.name not in LARGEST:
        return np.abs(travels.astype(stored).astype(np.float32) - sent)
    flat, growing = _HALF_STEP[stored.name]
    tokens = sent.shape[2]
    allowed = np.empty_like(sent)
    for start in range(0, tokens, page_size):
        page = slice(start, min(start + page_size, tokens))
        here = np.abs(travels[:, :, page])
        scale = here.max(axis=(2, 4), keepdims=True) / LARGEST[stored.name]
        # A page that two slabs write is rounded twice.
        times = 1 + (start // SLAB_TOKENS != (page.stop - 1) // SLAB_TOKENS)
        half = np.maximum(flat * scale, growing * here * (1 + growing) ** (times - 1))
        allowed[:, :, page] = times * half + _FLOAT32 * here.max(axis=(2, 4), keepdims=True)
    return allowed + np.abs(travels - sent)


def compare_entries(
    sent: np.ndarray, found: np.ndarray, allowed: np.ndarray
) -> Mapping[str, float]:
    """Return the largest change, the root-mean-square change and the bound, as fractions.

    The largest change is relative to the largest entry, the root-mean-square change to the
    root-mean-square entry. An entry that is NaN or infinite exceeds every bound.
    """
    sound = np.isfinite(found) & np.isfinite(sent)
    with np.errstate(invalid="ignore"):
        change = np.where(sound, np.abs(found - sent), np.inf)
        beyond = np.where(sound, np.maximum(change - allowed, 0), np.inf)
        largest = float(np.abs(sent[sound]).max(initial=0)) or 1.0
        return {
            "max_change": float(change.max()) / largest,
            "bound": float(allowed[sound].max(initial=0)) / largest,
            "rms_change": float(np.sqrt(np.mean(change**2) / (np.mean(sent[sound] ** 2) or 1.0)))
            if sound.all()
            else math.inf,
            "beyond": float(beyond.max()) / largest,
        }
