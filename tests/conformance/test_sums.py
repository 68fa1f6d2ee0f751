"""Faults by checksums of tokens."""

import numpy as np
import pytest

from jaxinfer.conformance.sums import name_by_sums

SENT = np.random.default_rng(0).integers(0, 2**32, (4, 40), dtype=np.uint32)


@pytest.mark.parametrize(
    ("found", "name"),
    [
        (SENT[::-1], "layer shifted, it has the sum of layer 3, token 0 of this slab"),
        (np.roll(SENT, 1, axis=1), "page offset off by one, it has the sum of layer 0, token 39"),
        (np.roll(SENT, 3, axis=1), "page offset, it has the sum of layer 0, token 37"),
        (np.roll(SENT, 8, axis=1), "page order, it has the sum of layer 0, token 32"),
        (np.roll(SENT, (1, 1), axis=(0, 1)), "misplaced, it has the sum of layer 3, token 39"),
        (SENT + np.uint32(1), ""),
    ],
)
def test_where_sums_came_from(found: np.ndarray, name: str) -> None:
    assert name_by_sums(SENT, found, 8).startswith(name)
    assert bool(name_by_sums(SENT, found, 8)) == bool(name)


def test_one_token_that_is_nobody_s() -> None:
    found = SENT.copy()
    found[2, 7] ^= 1
    assert name_by_sums(SENT, found, 8) == ""
