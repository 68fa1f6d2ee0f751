"""scripts/results.py: which tables a script takes as they stand."""

from pathlib import Path
from typing import Any

import pytest

from scripts.reproduce import results


def test_a_table_stands_for_the_same_command_code_and_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And is made anew for any other, or where it was not made by a script."""
    trace, out = tmp_path / "trace.csv", tmp_path / "out"
    trace.write_text("1")
    out.mkdir()
    path = out / "table.csv"
    path.write_text("rate\n7\n")  # Of a page's last version, say.
    made: list[int] = []

    def make() -> list[dict[str, Any]]:
        made.append(0)
        return [{"rate": len(made)}]

    def rate(*words: str) -> float:
        monkeypatch.setattr(sys, "argv", ["reproduce.py", *words, "--out", str(out)])
        (row,) = results.kept(path, make)
        return row["rate"]

    assert [rate(str(trace)), rate(str(trace))] == [1, 1]
    assert capsys.readouterr().out.count("table.csv: kept") == 1
    trace.write_text("2")
    assert [rate(f"--trace={trace}"), rate(f"--trace={trace}")] == [2, 2]
    trace.write_text("33")
    assert rate(f"--trace={trace}") == 3
    path.write_text("rate\n7\n")
    assert rate(f"--trace={trace}") == 4
    monkeypatch.setattr(results, "code_version", lambda: "another")
    assert rate(f"--trace={trace}") == 5
    path.unlink()
    assert rate(f"--trace={trace}") == 6
