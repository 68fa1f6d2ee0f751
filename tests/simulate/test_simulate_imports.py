"""The modelled world loads no JAX, and nothing that queues, forms batches or hands out pages."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHOW = "import sys, {}; print(' '.join(sys.modules))"


def loaded(module: str) -> set[str]:
    run = subprocess.run(
        [sys.executable, "-c", SHOW.format(module)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return set(run.stdout.split())


@pytest.mark.parametrize(
    "module",
    [
        "jaxinfer.simulate.run",
        "jaxinfer.checkpoints.hugging_face",
        "jaxinfer.lab.compare",
        "jaxinfer.commands.app",
        *(f"jaxinfer.lab.plan.{name}" for name in ("choose", "result", "registry", "sweep.sweep")),
    ],
)
def test_a_simulation_does_without_jax(module: str) -> None:
    found = loaded(module)
    assert module in found
    assert not {"jax", "jaxlib", "flax", "transformers", "matplotlib"} & found


@pytest.mark.parametrize(
    "module",
    [
        "config/costs",
        "config/stage_part",
        "config/step_costs",
        "hardware/catalogue",
        *(f"simulate/costs/{name}" for name in ("model", "roofline", "fit", "linear", "phases")),
        *(f"simulate/costs/{name}" for name in ("piecewise_linear", "curves")),
    ],
)
def test_costs_know_nothing_of_scheduling(module: str) -> None:
    """Costs are of finished batches; other modules decide what is in a batch."""
    source = (ROOT / "jaxinfer" / f"{module}.py").read_text()
    imports = {line.split()[1] for line in source.splitlines() if line.startswith("from jaxinfer")}
    assert imports <= {
        "jaxinfer.errors",
        "jaxinfer.config.costs",
        "jaxinfer.config.published",
        "jaxinfer.files.shipped",
        "jaxinfer.config.stage_part",
        "jaxinfer.config.step_costs",
        "jaxinfer.options.validation",
        "jaxinfer.serving.step_fit",
        "jaxinfer.serving.world",
        "jaxinfer.simulate.costs.model",
        "jaxinfer.simulate.costs.piecewise_linear",
        "jaxinfer.simulate.costs.step_floor",
        "jaxinfer.simulate.costs.curves",
        "jaxinfer.hardware.catalogue",
        "jaxinfer.simulate.costs.linear",
        "jaxinfer.steps.shapes",
        "jaxinfer.serving.batch",
        "jaxinfer.sharding.costs",
        "jaxinfer.simulate.costs.phases",
    }


def test_the_world_has_no_queue_policy_or_pages() -> None:
    source = (ROOT / "jaxinfer" / "simulate" / "world.py").read_text()
    for name in ("policies", "page_pool", "serving.instance", "batching", "waiting", "KVShards"):
        assert name not in source
