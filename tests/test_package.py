"""Metadata of the package, and the content of its wheel."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from datetime import date
from pathlib import Path

import pytest
import yaml

from jaxinfer.files.shipped import shipped_files

ROOT = Path(__file__).parents[1]


def test_licence_and_citation() -> None:
    """The keys that the Citation File Format 1.2.0 requires, and the licence's whole text."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= citation.keys()
    assert citation["authors"] == project["authors"] == [{"name": "The jaxinfer developers"}]
    assert isinstance(citation["date-released"], date)
    assert citation["license"] == project["license"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text()
    assert text.lstrip().startswith("Apache License")
    assert "END OF TERMS AND CONDITIONS" in text
    assert "limitations under the License." in text[-120:]


@pytest.mark.slow
def test_what_the_wheel_has(tmp_path: Path) -> None:
    """Code and all that ships, once each, and neither tests nor scripts."""
    unwanted = (".*", "__pycache__", "build", "*.egg-info", "runs", "docs")
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, symlinks=True, ignore=shutil.ignore_patterns(*unwanted))
    (source / "configs" / "of_mine.csv").write_text("a\n")  # Any file there ships.
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--wheel-dir", str(tmp_path), str(source)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert len(names) == len(set(names))
    found = {name for name in names if not name.split("/")[0].endswith(".dist-info")}
    code = {
        str(path.relative_to(source))
        for folder in ("jaxinfer", "jaxinfer/models", "jaxinfer/pallas_kernels")
        for path in (source / folder).rglob("*.py")
    }
    shipped = {f"jaxinfer/configs/{name}" for name in [*shipped_files(), "of_mine.csv"]}
    assert found == code | shipped | {"jaxinfer/py.typed"}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
