"""Runs that begin at once in one folder."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jaxinfer.report import run_folder
from jaxinfer.report.run_folder import RunFolder


def test_two_runs_that_begin_at_once_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both look before either has made its folder."""
    looked: list[Path] = []
    look = run_folder.run_folders

    def late(parent: Path) -> list[Path]:
        found = look(parent)
        if not looked:  # Another run begins meanwhile.
            looked.append(parent)
            (parent / str(len(found) + 1)).mkdir()
        return found

    monkeypatch.setattr(run_folder, "run_folders", late)
    with RunFolder(tmp_path, {}) as folder:
        assert folder.path == tmp_path / "2"


def test_many_at_once(tmp_path: Path) -> None:
    def begin(_: int) -> str:
        with RunFolder(tmp_path, {}) as folder:
            return folder.path.name

    with ThreadPoolExecutor(8) as threads:
        names = list(threads.map(begin, range(40)))
    assert sorted(map(int, names)) == list(range(1, 41))
