"""Compile an engine's steps for an H100 that is not there; what XLA makes of them stays in files.

    python gpu_programs.py FOLDER

For a process of its own, with XLA for CUDA. Each program has a folder below FOLDER by its name.
"""

import json
import sys
from pathlib import Path
from typing import Any

import jax

from jaxinfer.checkpoints.checkpoint import open_checkpoint
from jaxinfer.config.engine import EngineOptions
from jaxinfer.lab.sharding.targets import CompileTarget, devices_of
from jaxinfer.models.stage import Layers
from jaxinfer.runtime.stage import stage_plan as planning
from jaxinfer.runtime.stage.sampler import SamplerShape
from jaxinfer.runtime.stage.step import CompiledStep, Key
from scripts.bench.engine import LLAMA_3_8B

LAYERS = 2
EVERY_OPTION = {"edits": 16, "history": 256, "top": 8, "drawn": True, "top_k": True, "top_p": True}
SAMPLERS = {"greedy": SamplerShape(), "drawn": SamplerShape(greedy=False, **EVERY_OPTION)}


def parts(step: CompiledStep) -> dict[str, Any]:
    """Parts by name: the largest step with prefill and of decodes alone, and both heads."""
    shapes = step.limits.shapes()
    chosen = {"chunks": shapes[0], "decodes": next(s for s in shapes if not s.chunks)}
    heads = {
        name: step._head_parts(Key(shapes[0], sampler))[0] for name, sampler in SAMPLERS.items()
    }
    return chosen | heads


def main(folder: Path) -> None:
    """Compile them all."""
    # A GPU that is not there has no memory to ask about.
    planning._memory = lambda *_: (2**36, 2**36)  # type: ignore[assignment]
    folder.mkdir()
    config = LLAMA_3_8B | {"num_hidden_layers": LAYERS, "model_type": "llama"}
    (folder / "config.json").write_text(json.dumps(config))
    options = EngineOptions(load_format="dummy", dtype="bfloat16", num_pages=2000, max_num_seqs=256)
    plan = planning.make_plan(
        open_checkpoint(str(folder), "dummy").config,
        options,
        devices_of(CompileTarget.read("h100:1")),
        Layers(0, LAYERS, LAYERS),
        0,
    )
    step = CompiledStep(plan)
    with jax.default_device(plan.devices[0]), jax.set_mesh(plan.mesh):
        for name, part in parts(step).items():
            step._lower(part).compile({"xla_dump_to": str(folder / name)})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
