"""Models for the tests (the demo model's golden cases, a tiny one), and a rule for searches.

Imports of JAX are left to the fixtures: many tests are of plain Python.
"""

import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import properties  # noqa: F401  (the examples that property tests draw)
import pytest

if TYPE_CHECKING:
    from plan_cases import Carries

    from jaxinfer import LLM

# On a CPU, most of the tests' time goes into compilation, and little into what was compiled.
QUICK_TO_COMPILE = "--xla_backend_optimization_level=0"
if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):  # Later ones end at this flag.
    QUICK_TO_COMPILE += " --xla_cpu_use_fusion_emitters=false"
if "cuda" not in os.environ.get("JAX_PLATFORMS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK_TO_COMPILE}"
# Before anything counts the devices: tensor parallelism over 4 beside 4.
os.environ["JAX_NUM_CPU_DEVICES"] = "8"

DATA = Path(__file__).parent / "data"


# What these compile, others load: of two processes, none is to compile what the other is about to.
FIRST = ("test_converted.py", "test_golden.py")


@pytest.hookimpl(tryfirst=True)  # Before any are left out by their marks.
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every long test is a slow one; what others wait for comes first."""
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker("slow")
    items.sort(key=lambda item: item.path.name not in FIRST)


@pytest.fixture(scope="session")
def golden() -> list[dict[str, Any]]:
    """Greedy cases of the demo model by Hugging Face transformers, in float32."""
    return json.loads((DATA / "smollm2_golden.json").read_text())["cases"]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder: two Llama layers, 260 tokens (all bytes), context 256."""
    from tiny_model import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> "LLM":
    """The tiny model, with a pool of 64 pages of 8 tokens."""
    from tiny_model import TINY_OPTIONS

    from jaxinfer import LLM

    return LLM(str(tiny_folder), progress=False, **TINY_OPTIONS)


@pytest.fixture
def model(tiny: "LLM", tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The tiny model's folder; whoever loads it by a run file gets the one that is loaded."""
    from jaxinfer.errors import JaxinferError
    from jaxinfer.llm import LLM

    def load(config: Any) -> LLM:
        if config.model != str(tiny_folder):
            raise JaxinferError(f"no model {config.model}")
        return tiny

    monkeypatch.setattr(LLM, "from_config", load)
    return str(tiny_folder)


@pytest.fixture
def tiny_loaded_once(tiny: "LLM", monkeypatch: pytest.MonkeyPatch) -> None:
    """Give ``tiny`` to all that load the tiny model with its usual options."""
    from tiny_model import TINY_OPTIONS

    from jaxinfer.config.engine import EngineOptions
    from jaxinfer.llm import LLM

    load = LLM.from_config

    def find(run_file: Any, **options: Any) -> LLM:
        usual = run_file.model == tiny.config.model and not run_file.instances
        if usual and run_file.engine == EngineOptions(**TINY_OPTIONS):
            tiny.reset_prefix_cache()
            return tiny
        return load(run_file, **options)

    monkeypatch.setattr(LLM, "from_config", find)


@pytest.fixture
def carries(monkeypatch: pytest.MonkeyPatch) -> "Carries":
    """A rule in the simulator's place; all clusters keep the targets of a lone request."""
    from plan_cases import Carries

    from jaxinfer.simulate.targets import Verdict

    rule = Carries()
    monkeypatch.setattr("jaxinfer.simulate.capacity.load", rule)
    monkeypatch.setattr("jaxinfer.lab.plan.evaluate.load", rule)
    met = Verdict(True, 1, None, {})
    monkeypatch.setattr("jaxinfer.lab.plan.evaluate.alone", lambda *given: met)
    return rule


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are loaded without compiling their steps."""
    monkeypatch.setattr("jaxinfer.runtime.worker.Worker.prepare", lambda worker: iter(()))
