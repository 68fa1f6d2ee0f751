"""Faults by checksums of tokens."""

import numpy as np
import pytest

from jaxinfer.files.sums import name_by_sums

SENT = np.random.default_rng(0).integers(0, 2**32, (4, 40), dtype=np.uint32)


@pytest.mark.parametrize(
    ("found", "name"),
    [
        (SENT[::-1], "layer shifted, layer 2, token 100 has the sum of layer 5, token 100"),
        (
            np.roll(SENT, 1, axis=1),
            "page offset off by one, layer 2, token 101 has the sum of layer 2, token 100",
        ),
        (
            np.roll(SENT, 3, axis=1),
            "page offset, layer 2, token 103 has the sum of layer 2, token 100",
        ),
        (
            np.roll(SENT, 8, axis=1),
            "page order, layer 2, token 100 has the sum of layer 2, token 132",
        ),
        (
            np.roll(SENT, (1, 1), axis=(0, 1)),
            "misplaced, layer 2, token 100 has the sum of layer 5, token 139",
        ),
        (SENT + np.uint32(1), ""),
    ],
)
def test_where_sums_came_from(found: np.ndarray, name: str) -> None:
    """The slab begins at layer 2 and token 100."""
    assert name_by_sums(SENT, found, 8, 2, 100) == name


def test_the_token_that_is_named_is_one_that_was_found() -> None:
    """The first wrong sum is nobody's."""
    found = SENT[::-1].copy()
    found[0, 0] ^= 1
    assert name_by_sums(SENT, found, 8) == (
        "layer shifted, layer 0, token 1 has the sum of layer 3, token 1"
    )


def test_one_token_that_is_nobody_s() -> None:
    found = SENT.copy()
    found[2, 7] ^= 1
    assert name_by_sums(SENT, found, 8) == ""
