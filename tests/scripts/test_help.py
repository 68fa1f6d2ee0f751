"""Every script says what it is for: it can be imported, and its --help works."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
FILES = {path.relative_to(SCRIPTS).as_posix(): path for path in sorted(SCRIPTS.rglob("*.py"))}
PROGRAMS = [name for name, path in FILES.items() if '__name__ == "__main__"' in path.read_text()]


@pytest.mark.parametrize("name", PROGRAMS)
def test_help(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())  # Some set it before they load JAX.
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(FILES[name]), run_name="__main__")
    assert not ended.value.code
    assert capsys.readouterr().out.lower().startswith("usage: ")


def test_help_of_the_suite() -> None:
    done = subprocess.run(
        [SCRIPTS / "bench" / "gpu_suite.sh", "--help"], capture_output=True, text=True, check=True
    )
    assert "--rehearse" in done.stdout


def test_a_line_for_each_file() -> None:
    """And none for what is not there: scripts/README.md."""
    text = (SCRIPTS / "README.md").read_text(encoding="utf-8")
    told = re.findall(r"^\| `([a-z0-9_/.]+)` \|", text, re.M)
    there = [name for name in FILES if not name.endswith("__init__.py")]
    papers = [f"{Path(name).parent.as_posix()}/" for name in FILES if name.count("/") == 2]
    wanted = {name for name in there if name.count("/") < 2} | set(papers)
    assert sorted(told) == sorted(wanted | {"bench/gpu_suite.sh"})


def test_commands_of_docs_name_scripts_that_are_there() -> None:
    docs = SCRIPTS.parent / "docs"
    pages = [*docs.rglob("*.md"), *SCRIPTS.parent.glob("*.md"), SCRIPTS / "README.md"]
    pages.remove(SCRIPTS.parent / "CHANGELOG.md")
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for module in re.findall(r"-m (scripts[a-z0-9_.]*)", text):
            path = SCRIPTS.parent / module.replace(".", "/")
            assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), page
        for name in re.findall(r"scripts/([a-z0-9_/]+\.(?:py|sh))", text):
            assert (SCRIPTS / name).is_file(), (page, name)
