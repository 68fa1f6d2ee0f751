"""Measure the host's time to launch a step of decodes, with and without command buffers.

    python -m scripts.bench.launching --json launching.json
    python -m scripts.bench.launching --json launching.json --rehearse   # on a CPU: tiny

The model has Llama 3 8B's shape and random weights. Steps consist of padding: they have all kernels
of a step, but no context. Each set of XLA's flags has its own process. If that process fails, for
example because jaxlib does not know a flag, its last line is recorded. ``host_s`` is the time of
one launch on the host, including the transfer of inputs. ``step_s`` is the time of one of many
steps with inputs that are already on the device.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import jax
import numpy as np

from jaxinfer import LLM
from jaxinfer.runtime.stage.sampler import SamplerShape
from jaxinfer.runtime.stage.sampling_inputs import empty_sampling
from jaxinfer.runtime.stage.stage import Stage
from jaxinfer.runtime.stage.step import Key
from jaxinfer.steps.shapes import StepShape
from scripts.bench.engine import FULL, REHEARSAL

# A command buffer is recorded again if an address has changed. Without command buffers, each kernel
# is launched separately. XLA keeps parts that are skipped at fixed addresses.
_MODE = "--xla_gpu_command_buffer_update_mode="
FLAGS = {
    "default": "",
    "no command buffers": "--xla_gpu_enable_command_buffer=",
    "temporaries skipped": f"{_MODE}SKIP_TEMP",
    "skipped by profile": f"{_MODE}SKIP_PROFILED",
}
# JAX blocks callers with many computations in flight, and a step has two.
LAUNCHES, FEW, ROUNDS = 20, 4, 5


def times(stage: Stage, shape: StepShape) -> dict[str, float]:
    """Return the seconds of a launch on the host, and of a step."""
    key = Key(shape, SamplerShape())
    inputs, sampling = next(stage.padding(shape)), empty_sampling(shape.rows, key.sampler)
    there = jax.device_put((inputs, sampling), stage.plan.whole)
    launch(stage, key, 1, *there)  # This compiles.
    host = [launch(stage, key, FEW, inputs, sampling)[0] / FEW for _ in range(ROUNDS)]
    whole = [launch(stage, key, LAUNCHES, *there)[1] / LAUNCHES for _ in range(ROUNDS)]
    return {"host_s": statistics.median(host), "step_s": statistics.median(whole)}


def launch(stage: Stage, key: Key, count: int, inputs: Any, sampling: Any) -> tuple[float, float]:
    """Return the seconds until ``count`` steps are launched, and until they are done."""
    start = time.perf_counter()
    for _ in range(count):
        hidden = stage.forward(key, inputs, None)
        samples, _ = stage.sample(key, hidden, sampling, None)
    launched = time.perf_counter() - start
    np.asarray(samples.token_S)
    return launched, time.perf_counter() - start


def measured(rehearse: bool) -> dict[str, dict[str, float]]:
    """Return the times by rows, with the flags of this process."""
    size = REHEARSAL if rehearse else FULL
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(size.model))
        llm = LLM(folder, progress=False, **size.engine)
    stage = llm.engine.worker.stages[0]
    assert isinstance(stage, Stage)
    shapes = [shape for shape in stage.step.limits.shapes() if not shape.chunks]
    return {str(shape.tokens): times(stage, shape) for shape in shapes}


def in_own_process(flags: str, rehearse: bool) -> dict[str, Any] | str:
    """Return the times with these flags, or the last line of a process that has failed."""
    environment = os.environ | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()}
    command = [sys.executable, "-m", "scripts.bench.launching", "--json", "-", "--here"]
    done = subprocess.run(
        command + ["--rehearse"] * rehearse, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        unknown = [line for line in said if "Unknown flag" in line]
        return (unknown or said or [f"ended by {done.returncode}"])[-1]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@click.command()
@click.option("--json", "json_path", required=True, help="File for the figures.")
@click.option("--here", is_flag=True, help="In this process, to standard output.")
@click.option("--rehearse", is_flag=True, help="A tiny model, kernels interpreted: on a CPU.")
def main(json_path: str, here: bool, rehearse: bool) -> None:
    """Measure with each set of flags, print and write."""
    if here:
        print(json.dumps(measured(rehearse)))
        return
    figures: dict[str, Any] = {"jax": jax.__version__, "rehearsed": rehearse, "flags": FLAGS}
    figures["times"] = {}
    # XLA for CPUs does not know flags for GPUs.
    for name, flags in list(FLAGS.items())[: 1 if rehearse else None]:
        found = in_own_process(flags, rehearse)
        figures["times"][name] = found
        Path(json_path).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
        if isinstance(found, str):
            print(f"{name}: {found}", flush=True)
            continue
        for rows, each in found.items():
            print(
                f"{name}, {rows} rows: launched in {1000 * each['host_s']:.2f} ms, "
                f"a step takes {1000 * each['step_s']:.2f}",
                flush=True,
            )
    if isinstance(figures["times"]["default"], str):
        raise SystemExit(figures["times"]["default"])


if __name__ == "__main__":
    main()
