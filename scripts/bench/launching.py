"""Measure the host's time to launch a step of decodes, with and without command buffers.

    python -m scripts.bench.launching --json launching.json
    python -m scripts.bench.launching --json launching.json --rehearse   # on a CPU: tiny

The model has Llama 3 8B's shape and random weights. Steps consist of padding: they have all kernels
of a step, but no context. Each set of XLA's flags has its own process. If that process fails, for
example because jaxlib does not know a flag, its last line is recorded. ``host_s`` is the time of
one launch on the host, including the transfer of inputs. ``in_place_s`` is the same if all steps
read their inputs at the same addresses, and write their results over those of the step before.
``step_s`` is the time of one of many steps with inputs that are already on the device.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import jax
import numpy as np

from jaxinfer import LLM
from jaxinfer.runtime.stage.leaves import Graph, flat, without_layers
from jaxinfer.runtime.stage.sampler import SamplerShape
from jaxinfer.runtime.stage.sampling_inputs import empty_sampling
from jaxinfer.runtime.stage.stage import Stage
from jaxinfer.runtime.stage.step import Key, forward, head
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
    step_in_place = in_place(stage, key, *there)
    launch_in_place(step_in_place, 1)
    fixed = [launch_in_place(step_in_place, FEW) / FEW for _ in range(ROUNDS)]
    names = "host_s", "in_place_s", "step_s"
    return dict(zip(names, map(statistics.median, (host, fixed, whole)), strict=True))


def launch(stage: Stage, key: Key, count: int, inputs: Any, sampling: Any) -> tuple[float, float]:
    """Return the seconds until ``count`` steps are launched, and until they are done."""
    start = time.perf_counter()
    for _ in range(count):
        hidden = stage.forward(key, inputs, None)
        samples, _ = stage.sample(key, hidden, sampling, None)
    launched = time.perf_counter() - start
    np.asarray(samples.token_S)
    return launched, time.perf_counter() - start


def in_place(stage: Stage, key: Key, inputs: Any, sampling: Any) -> Callable[[], Any]:
    """Compile a step that writes its results over those of the step before; return its launch.

    Tokens are not fed back: ``previous_S`` stays as it is.
    """
    plan, previous_S = stage.plan, stage.previous_S
    leaves, tree = jax.tree.flatten(stage.parameters)
    head_graph, outer = flat(without_layers(plan.graphdef, stage.parameters))
    run_layers = partial(forward, Graph(plan.graphdef, tree), plan.layers, plan.config.layout)
    run_head = partial(head, head_graph, plan.limits.max_num_seqs, key.sampler)
    x_SD, x_TD = stage.forward(key, inputs, None)
    samples, _ = stage.sample(key, (x_SD, x_TD), sampling, None)
    stage.previous_S = previous_S
    shardings = jax.tree.map(lambda x: x.sharding, (stage.kv, x_SD, x_TD))
    # Their first argument has the results of the step before.
    jitted_layers = jax.jit(
        lambda _, *arguments: run_layers(*arguments),
        donate_argnums=(0, 2),
        keep_unused=True,
        out_shardings=shardings,
    )
    jitted_head = jax.jit(
        lambda _, *arguments: run_head(*arguments),
        donate_argnums=0,
        keep_unused=True,
        out_shardings=plan.whole,
    )
    every, results = tuple(leaves), {"hidden": (x_SD, x_TD), "samples": samples}
    with jax.set_mesh(plan.mesh):
        layers = jitted_layers.lower(
            results["hidden"], every, stage.kv, previous_S, inputs, None
        ).compile()
        last = jitted_head.lower(samples, outer, x_SD, previous_S, sampling).compile()

    def step() -> Any:
        stage.kv, *hidden = layers(results["hidden"], every, stage.kv, previous_S, inputs, None)
        results["hidden"] = tuple(hidden)
        results["samples"] = last(results["samples"], outer, hidden[0], previous_S, sampling)
        return results

    return step


def launch_in_place(step: Callable[[], Any], count: int) -> float:
    """Return the seconds until ``count`` steps are launched, and wait for them."""
    start = time.perf_counter()
    for _ in range(count):
        found = step()
    launched = time.perf_counter() - start
    jax.block_until_ready(found)
    return launched


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
                f"{name}, {rows} rows: launched in {1000 * each['host_s']:.2f} ms, in place in "
                f"{1000 * each['in_place_s']:.2f}, a step takes {1000 * each['step_s']:.2f}",
                flush=True,
            )
    if isinstance(figures["times"]["default"], str):
        raise SystemExit(figures["times"]["default"])


if __name__ == "__main__":
    main()
