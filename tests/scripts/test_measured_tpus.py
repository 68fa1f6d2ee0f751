"""The layouts that were measured on TPUs, by hand."""

import pytest

from scripts.reproduce.sharding.tpu import MEASURED, Assumed, _both


def test_seconds_of_a_token_are_bytes_and_rings() -> None:
    """Weights of 8 bits and a head of 16, KV of 512 entries, and 160 all-reduces at 45 GB/s."""
    D, H, N, F, V, layers, batch = 8192, 128, 64, 28672, 128256, 80, 8
    tokens_s = _both(batch, 2048, Assumed())
    for chips, own, ours in ((16, batch, tokens_s[0]), (8, batch // 2, tokens_s[1])):
        # Sixteen chips have copies of the eight KV heads.
        weights = layers * (D * (2 * N + 2 * max(chips, 8)) * H + 3 * D * F) + 2 * V * D
        entries = layers * 2 * H * max(8 // chips, 1) * own * 512
        sent = 2 * (chips - 1) / chips * D * 2 * own
        seconds = (weights / chips + entries) / 819e9 + 2 * layers * (sent / 45e9 + 1e-6)
        assert 1 / ours == pytest.approx(seconds, rel=0.02)  # Hidden states are few.


def test_all_pairs_are_there() -> None:
    assert len(MEASURED) == 12
    assert sorted({batch for batch, *_ in MEASURED}) == [8, 16, 32, 64, 128]
