"""Profiles in their files, and the lines through their points, by hand."""

import hashlib
import json
import os
import pwd
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from jaxinfer import JaxinferError
from jaxinfer.files import kept
from jaxinfer.runtime.stage.devices import configure_jax
from jaxinfer.steps.profile import (
    Profile,
    load_profile,
    profile_folder,
    profile_path,
    read_profile,
    store_profile,
)
from jaxinfer.steps.times import StepPoint

KEY = {"model": "m", "chunk_tokens": 64, "nested": {"a": 1, "b": [2]}}
FOUND = Profile(
    KEY,
    [(1, (1.0, 3.0)), (2, (1.5, 4.5))],
    [(0, 0, (4.0, 1.0)), (10, 0, (6.0, 1.0)), (0, 100, (4.0, 3.5)), (10, 100, (6.0, 3.5))],
    [StepPoint(((0, 64), (7, 1)), (1.0, 2.0))],
)


def test_lines_of_each_stage_by_how_much_it_is_slowed_down() -> None:
    """Prefills: 2 + 2 n in all, 3.5 + 3.5 n with stage 2 twice as slow; contexts 0.2 and 0.025."""
    plain, slowed = FOUND.fit([1.0, 1.0]), FOUND.fit([1.0, 2.0])
    assert (plain.prefill.per_token, plain.prefill.constant) == pytest.approx((2, 2))
    assert (slowed.prefill.per_token, slowed.prefill.constant) == pytest.approx((3.5, 3.5))
    for fit, decode, constant in ((plain, 0.025, 5), (slowed, 0.05, 6)):
        assert fit.mixed.per_prefill_context == pytest.approx(0.2)
        assert fit.mixed.per_decode_context == pytest.approx(decode)
        assert fit.mixed.constant == pytest.approx(constant)


def test_decodes_alone_have_a_line_of_their_own() -> None:
    """0.5 + 0.25 per row + 0.001 per entry they see, their own too, and twice that of stage 2."""

    def point(rows: int, before: int, chunk: int = 0) -> StepPoint:
        seconds = 0.5 + 0.25 * rows + 0.001 * rows * (before + 1) + 100 * chunk
        chunks = ((0, chunk),) * bool(chunk)
        return StepPoint((*[(before, 1)] * rows, *chunks), (seconds, 2 * seconds))

    points = [point(n, before) for n in (1, 4) for before in (0, 99)] + [point(4, 7, chunk=8)]
    fit = replace(FOUND, points=points).fit([1.0, 3.0]).decode
    assert fit
    found = fit.per_context, fit.per_sequence, fit.constant
    assert found == pytest.approx((0.007, 1.75, 3.5))
    assert FOUND.fit([1.0, 1.0]).decode is None
    assert replace(FOUND, points=points[:2] * 2).fit([1.0, 1.0]).decode is None


def test_how_well_lines_fit() -> None:
    """Times 1, 1, 2 of lengths 1, 3, 2: by relative errors, a constant of 8 / 9 in the middle."""
    prefills = [(1, (0.5, 0.5)), (3, (0.75, 0.25)), (2, (1.0, 1.0))]
    steps = [StepPoint(((0, 1),), (0.0, 0.0))]
    found = Profile({}, prefills, [(5, 0, (1.0, 1.0)), (5, 7, (1.0, 1.0))], steps)
    fit = found.fit([1.0, 1.0]).prefill
    # By symmetry there is no slope: errors 1 - c, 1 - c, 1 - c / 2 are least at c = 2.5 / 2.25.
    assert (fit.per_token, fit.constant) == pytest.approx((0, 10 / 9), abs=1e-9)
    prefill, mixed = found.quality()
    assert prefill.mape == pytest.approx((1 / 9 + 1 / 9 + 4 / 9) / 3)
    assert prefill.r2 == pytest.approx(1 - (2 * (1 / 9) ** 2 + (8 / 9) ** 2) / (2 / 3))
    # Equal times leave nothing to explain.
    assert (mixed.r2, mixed.mape) == pytest.approx((1.0, 0.0))


def test_a_profile_is_kept_under_a_digest_of_its_key(tmp_path: Path) -> None:
    """The digest is the same whatever the order of the key's parts."""
    text = '{"chunk_tokens": 64, "model": "m", "nested": {"a": 1, "b": [2]}}'
    name = f"{hashlib.sha256(text.encode()).hexdigest()[:20]}.json"
    turned = {"nested": {"b": [2], "a": 1}, "chunk_tokens": 64, "model": "m"}
    folder = tmp_path / "a" / "b"
    assert load_profile(KEY, folder) is None
    assert store_profile(FOUND, folder) == folder / name
    assert [path.name for path in folder.iterdir()] == [name]
    assert profile_path(turned, folder) == folder / name
    assert load_profile(turned, folder) == read_profile(folder / name) == FOUND
    assert load_profile(KEY | {"chunk_tokens": 7}, folder) is None
    stored = json.loads((folder / name).read_text())
    assert set(stored) == {"key", "prefills", "mixed", "points"}
    (folder / name).unlink()
    (folder / name).mkdir()
    assert load_profile(KEY, folder) is None


def test_profiles_are_kept_in_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert profile_folder() == tmp_path / ".cache" / "jaxinfer" / "profiles"
    path = store_profile(FOUND)
    assert path.parent == profile_folder()
    assert load_profile(KEY) == FOUND
    assert profile_path(KEY) == path


def test_a_profile_is_there_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written beside it, under a name of this process, and moved there at once."""
    path = store_profile(FOUND, tmp_path)
    newer = Profile(KEY, FOUND.prefills[:1], [], FOUND.points)
    moved = []

    def note(part: Path, to: Path) -> None:
        assert load_profile(KEY, tmp_path) == FOUND
        assert read_profile(part) == newer
        moved.append((part.name, to))
        os.rename(part, to)

    monkeypatch.setattr(kept.os, "replace", note)
    store_profile(newer, tmp_path)
    part = f"{path.name}.{os.getpid()}-{threading.get_ident()}.part"
    assert moved == [(part, path)]
    assert load_profile(KEY, tmp_path) == newer


def test_a_user_without_a_home_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """An arbitrary user of a container, who is not in its list, is told to set HOME."""

    def unknown(number: int) -> None:
        raise KeyError(number)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(JaxinferError, match=r"profiles: .* no home: set HOME"):
        profile_folder()
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    configure_jax()  # Goes without a cache.
