"""Programs of a GPU in a step, compiled by XLA for CUDA where that is installed."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from jaxinfer.sharding.targets import CompileTarget

ROOT = Path(__file__).parents[3]
PROGRAM = ROOT / "tests" / "support" / "gpu_programs.py"
HAS_CUDA = find_spec("jax_plugins") and any(
    find_spec(f"jax_plugins.xla_cuda{version}") for version in (12, 13)
)


@pytest.mark.skipif(not HAS_CUDA, reason="needs XLA for CUDA: pip install 'jax[cuda12]'")
def test_each_program_of_a_step_is_one_command_buffer(tmp_path: Path) -> None:
    """The buffer has all, with no branch or loop: the host would wait for its condition."""
    # Without the flags of these tests, by which nothing is optimised.
    environment = os.environ | CompileTarget.read("h100:1").environment() | {"XLA_FLAGS": ""}
    environment |= {"PYTHONPATH": str(ROOT), "JAX_ENABLE_COMPILATION_CACHE": "0"}
    folder = tmp_path / "programs"
    subprocess.run([sys.executable, PROGRAM, folder], env=environment, check=True)
    programs = sorted(path.name for path in folder.iterdir() if path.is_dir())
    assert programs == ["chunks", "decodes", "drawn", "greedy"]
    for name in programs:
        (path,) = (folder / name).glob("*thunk_sequence_after_thunk_passes.txt")
        thunks = path.read_text()
        assert re.findall(r"^\d+: (\w+)", thunks, re.M) == ["kCommandBuffer"], name
        assert not re.findall(r"kConditional|kWhile", thunks), name
        assert len(re.findall(r"^    \d+: k\w+", thunks, re.M)) > 10, name
