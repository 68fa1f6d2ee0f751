"""The notebooks of examples/: run from top to bottom, kept without outputs."""

import json
import os
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def test_a_notebook_is_kept_without_outputs() -> None:
    for path in NOTEBOOKS:
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            if cell["cell_type"] == "code":
                assert (cell["outputs"], cell["execution_count"]) == ([], None), path


def test_all_examples_are_listed() -> None:
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for path in [*NOTEBOOKS, *EXAMPLES.glob("*.py")]:
        assert f"[{path.name}]({path.name})" in text


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook runs as a user's would: its kernel has none of the tests' settings."""
    import nbformat
    from nbclient import NotebookClient

    for name in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    paths = [str(EXAMPLES.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(EXAMPLES)}}
    NotebookClient(notebook, timeout=None, resources=where).execute()  # pytest's is the limit.
