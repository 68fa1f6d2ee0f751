"""The serving loop is plain Python: it loads neither JAX nor numpy nor what runs models."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHOW = "import sys, {}; print(' '.join(sys.modules))"
MODULES = sorted(path.stem for path in (ROOT / "jaxinfer/serving").glob("[!_]*.py"))


@pytest.mark.parametrize("module", MODULES)
def test_serving_is_plain_python(module: str) -> None:
    code = SHOW.format(f"jaxinfer.serving.{module}")
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = run.stdout.split()
    assert f"jaxinfer.serving.{module}" in loaded
    heavy = {"jax", "jaxlib", "numpy", "flax", "transformers", "scipy"} & set(loaded)
    assert not heavy
    ours = {name for name in loaded if name.startswith("jaxinfer.")}
    beside = {name for name in ours if not name.startswith("jaxinfer.serving")}
    checks = {"files", "files.shipped", "options", "options.validation"}
    assert beside <= {
        "jaxinfer.errors",
        "jaxinfer.request",
        *(f"jaxinfer.{name}" for name in checks),
    }
