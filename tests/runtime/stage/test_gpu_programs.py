"""Programs of a GPU in a step, compiled by XLA for CUDA where that is installed."""

import math
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from jaxinfer.lab.sharding.targets import CompileTarget
from scripts.bench.engine import LLAMA_3_8B

ROOT = Path(__file__).parents[3]
PROGRAM = ROOT / "tests" / "support" / "gpu_programs.py"
HAS_CUDA = find_spec("jax_plugins") and any(
    find_spec(f"jax_plugins.xla_cuda{version}") for version in (12, 13)
)


pytestmark = pytest.mark.skipif(
    not HAS_CUDA, reason="needs XLA for CUDA: pip install 'jax[cuda12]'"
)
# As gpu_programs has it.
LAYERS = 2
# Of what the layers compute; places of rows are fewer.
LARGE = 2**20


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of what XLA makes of each program."""
    folder = tmp_path_factory.mktemp("gpu") / "programs"
    # Without the flags of these tests, by which nothing is optimised.
    environment = os.environ | CompileTarget.read("h100:1").environment() | {"XLA_FLAGS": ""}
    environment |= {"PYTHONPATH": str(ROOT), "JAX_ENABLE_COMPILATION_CACHE": "0"}
    subprocess.run([sys.executable, PROGRAM, folder], env=environment, check=True)
    return folder


def test_each_program_of_a_step_is_one_command_buffer(programs: Path) -> None:
    """The buffer has all, with no branch or loop: the host would wait for its condition."""
    names = sorted(path.name for path in programs.iterdir() if path.is_dir())
    assert names == ["chunks", "decodes", "drawn", "greedy"]
    for name in names:
        (path,) = (programs / name).glob("*thunk_sequence_after_thunk_passes.txt")
        thunks = path.read_text()
        assert re.findall(r"^\d+: (\w+)", thunks, re.M) == ["kCommandBuffer"], name
        assert not re.findall(r"kConditional|kWhile", thunks), name
        assert len(re.findall(r"^    \d+: k\w+", thunks, re.M)) > 10, name


@pytest.mark.parametrize("name", ["chunks", "decodes"])
def test_places_of_rows_are_found_once(programs: Path, name: str) -> None:
    """No fusion of a layer has prefix sums of its own, for each of its elements."""
    (path,) = (programs / name).glob("*after_optimizations.txt")
    bodies = dict(re.findall(r"\n%(\S+) \(.*?\{\n(.*?)\n\}", path.read_text(), re.S))
    found = re.findall(r" = (.*?) fusion\(.*?calls=%([\w.]+)", path.read_text())
    large = [body for result, body in found if elements(result) >= LARGE]
    assert len(large) > 10
    assert not [body for body in large if "reduce-window(" in bodies[body]]


@pytest.mark.parametrize("name", ["chunks", "decodes"])
def test_gate_and_up_have_16_bits(programs: Path, name: str) -> None:
    """Products, as they are written and read again."""
    (path,) = (programs / name).glob("*after_optimizations.txt")
    wide = LLAMA_3_8B["intermediate_size"]
    (entry,) = re.findall(r"\nENTRY .*", path.read_text(), re.S)
    assert re.search(rf"bf16\[\d+,{wide}\]", entry)
    assert not re.search(rf"f32\[\d+,{wide}\]", entry)


@pytest.mark.parametrize("name", ["chunks", "decodes"])
def test_queries_keys_and_values_are_one_product(programs: Path, name: str) -> None:
    """Of one weight, which no step puts together."""
    (path,) = (programs / name).glob("*after_optimizations.txt")
    text = path.read_text()
    heads = LLAMA_3_8B["num_attention_heads"] + 2 * LLAMA_3_8B["num_key_value_heads"]
    columns = heads * LLAMA_3_8B["hidden_size"] // LLAMA_3_8B["num_attention_heads"]
    results = [result for result in products(text) if result.endswith(f",{columns}]")]
    assert len(results) == LAYERS
    together = re.findall(r" = (\S+) concatenate\(", text)
    assert together
    assert max(map(elements, together)) < LARGE


def test_what_a_layers_products_write_has_16_bits(programs: Path) -> None:
    """But for decodes', of which a few rows are summed in parts."""
    (path,) = (programs / "chunks").glob("*after_optimizations.txt")
    large = [result for result in products(path.read_text()) if elements(result) >= LARGE]
    assert len(large) == 5 * LAYERS
    assert all(result.startswith("bf16[") for result in large)


def products(text: str) -> list[str]:
    """Results of matrix products, by XLA's Triton or cuBLAS, as HLO writes them."""
    kinds = r"(?:fusion|custom-call)\(.*(?:calls=%gemm_fusion|__cublas)"
    return re.findall(rf" = \(?(\w+\[[\d,]+\])\S* {kinds}", text)


def elements(result: str) -> int:
    """The size of the largest array that an instruction returns, as HLO writes it."""
    sizes = re.findall(r"[a-z]\w*\[([\d,]*)\]", result)
    return max(math.prod(map(int, filter(None, size.split(",")))) for size in sizes)
