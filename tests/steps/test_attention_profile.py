"""Eqs. 3 and 4 against known coefficients, and how they are kept."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from jaxinfer.serving.step_fit import AttentionFit
from jaxinfer.steps import profile as stored
from jaxinfer.steps.attention_profile import (
    AttentionProfile,
    ShardPoints,
    load_attention,
    store_attention,
)

GRID = [(heads, heads * context) for heads in (1, 4, 9) for context in (10, 200, 1000)]


def points(fit: AttentionFit, group: str = "g") -> ShardPoints:
    """Times that follow the equations exactly."""
    alone = [(n, g, fit.per_pair * n + fit.per_entry * g + fit.constant) for n, g in GRID]
    sent = [(n, fit.exchange_per_pair * n + fit.exchange) for n in (1, 4, 9)]
    return ShardPoints(group, alone, sent if fit.exchange else [], [])


@pytest.mark.parametrize(
    "known",
    [AttentionFit(2e-6, 3e-9, 5e-5, 1e-6, 4e-5), AttentionFit(0.0, 1e-9, 2e-4)],
)
def test_fits_find_known_coefficients(known: AttentionFit) -> None:
    found = points(known)
    for name, value in vars(known).items():
        assert getattr(found.fit(), name) == pytest.approx(value, rel=1e-6, abs=1e-15)
    assert found.errors() == pytest.approx((0.0, 0.0), abs=1e-9)
    # A device that is emulated computes more slowly; its link is no slower.
    slow = found.fit(3.0)
    assert slow.per_entry == pytest.approx(3 * known.per_entry)
    assert slow.exchange == pytest.approx(known.exchange)


def test_no_time_falls_with_work_and_the_error_is_relative() -> None:
    """Times 1 and 3 whatever the work: a constant c of least (1 - c)^2 + (1 - c / 3)^2 is 1.2."""
    found = ShardPoints("g", [(1, 100, 3.0), (2, 200, 1.0)])
    assert found.fit() == AttentionFit(0.0, 0.0, pytest.approx(1.2))
    assert found.errors() == pytest.approx(((0.2 + 0.6) / 2, 0.0))


def test_a_stage_whose_heads_lie_together_takes_no_time() -> None:
    assert ShardPoints("g", []).fit() == AttentionFit(0.0, 0.0, 0.0)


def test_a_profile_is_kept_beside_that_of_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "FOLDER", tmp_path)
    own, far = AttentionFit(1e-6, 1e-9, 1e-5), AttentionFit(1e-6, 4e-9, 1e-5, 1e-7, 1e-5)
    dense = replace(points(own, "p"), dense=[(4, 1e-4), (16, 2e-4), (64, 5e-4)])
    profile = AttentionProfile({"model": "m"}, [dense, points(far, "w")])
    assert load_attention(profile.key) is None
    stored.store_profile(stored.Profile(profile.key, [], [], []))
    assert load_attention(profile.key) is None
    store_attention(profile)
    assert load_attention(profile.key) == profile
    assert load_attention({"model": "other"}) is None
    first, second = profile.fits({"p": 2.0})
    assert first.constant == pytest.approx(2 * own.constant)
    assert second.per_entry == pytest.approx(far.per_entry)
    slow, none = profile.dense({"p": 2.0})
    # Of the smallest bucket with so many tokens; beyond all of them, of the largest.
    assert [slow(n) for n in (1, 4, 4.5, 17, 99)] == [2e-4, 2e-4, 4e-4, 1e-3, 1e-3]
    assert none(4) == 0.0


def test_a_profile_of_an_older_version_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "FOLDER", tmp_path)
    profile = AttentionProfile({"model": "m"}, [points(AttentionFit(1e-6, 1e-9, 1e-5))])
    path = store_attention(profile)
    record = json.loads(path.read_text())
    del record["shards"][0]["dense"]
    path.write_text(json.dumps(record))
    assert load_attention(profile.key) is None
