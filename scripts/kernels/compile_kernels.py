"""Compile each kernel, and the engine's steps with them, to machine code for absent GPUs.

    python -m scripts.kernels.compile_kernels > table.md

This needs no GPU and no driver, but the CUDA plugin of the installed jax, and ptxas;
``make compile-all`` makes such an environment. In addition to lowering, it finds code that the
compilers of Triton, Mosaic GPU and NVIDIA refuse. It prints how many registers a kernel takes, how
many bytes spill to memory, and whether wgmma had to be serialised. If nvidia-cuda-nvdisasm is
installed, it also counts the instructions of a kernel's loop over tiles.

The steps are those of a Llama 3 8B with 2 layers; they must write pages in place. The program exits
with 1 if anything fails.
"""

import json
import os
import re
import stat
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

# Set before JAX is imported: a ptxas that stores its messages, which Mosaic finds on PATH.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["PATH"] = f"{tempfile.mkdtemp()}/bin:{os.environ['PATH']}"

import click
import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from jaxinfer.checkpoints.checkpoint import open_checkpoint
from jaxinfer.config.engine import EngineOptions
from jaxinfer.lab.sharding import targets
from jaxinfer.models.stage import Layers
from jaxinfer.runtime.stage import stage_plan as planning
from jaxinfer.runtime.stage.sampler import SamplerShape
from jaxinfer.runtime.stage.step import CompiledStep, Key
from scripts.bench.engine import LLAMA_3_8B
from scripts.kernels.lower_kernels import Variant, ampere_variants, variants
from scripts.kernels.machine_code import disassemble, disassembler, tile_loop

# Options of the model whose steps are compiled.
LAYERS = 2
SCRATCH = Path(os.environ["PATH"].split(":")[0]).parent
PTXAS = """#!/bin/sh
test -f "$1" || exec "{real}" "$@"
"{real}" "$@" -v > "{logs}/$$" 2>&1
status=$?
cat "{logs}/$$" >&2
for word in "$@"; do
    test "$before" = -o && cp "$word" "{logs}/$$.cubin" 2> /dev/null
    before="$word"
done
exit $status
"""
# Triton's kernels are assembled by the ptxas in this folder, Mosaic's by the one on PATH.
USE_PTXAS: Any = {"xla_gpu_cuda_data_dir": str(SCRATCH)}


# Kernels by their names in the tables.
GPUS = {name.upper(): gpu for name, gpu in targets.GPUS.items()}


def devices(gpu: str, count: int = 1) -> list[Any]:
    """Return ``count`` GPUs to compile for."""
    found = topologies.get_topology_desc(
        platform="cuda",
        topology_name=gpu,
        target_config=targets.description(GPUS[gpu]),
        topology=f"1x1x{count}",
    )
    return list(found.devices)


def install_ptxas() -> None:
    """Install the wheel's ptxas, with all its messages, where compilers look for it."""
    package = find_spec("nvidia")
    for folder in package.submodule_search_locations or () if package else ():
        root = Path(folder) / "cuda_nvcc"
        if (root / "bin/ptxas").exists():
            (SCRATCH / "bin").mkdir()
            (SCRATCH / "logs").mkdir()
            (SCRATCH / "nvvm").symlink_to(root / "nvvm")
            script = SCRATCH / "bin/ptxas"
            script.write_text(PTXAS.format(real=root / "bin/ptxas", logs=SCRATCH / "logs"))
            script.chmod(script.stat().st_mode | stat.S_IXUSR)
            return
    sys.exit("no ptxas: pip install nvidia-cuda-nvcc-cu12")


class Assembled(NamedTuple):
    """Messages of the assembler and the disassembler about a variant's kernels.

    Attributes:
        registers: registers and spilled bytes of each kernel named paged_* or grouped_*, or the
            error's first line.
        loops: numbers of instructions in the loop over tiles, by kind, for each kernel with one.
    """

    registers: str
    loops: list[dict[str, int]]


def assembled(compile_it: Callable[[], object]) -> Assembled:
    """Compile kernels, and read the messages about them."""
    for log in (SCRATCH / "logs").iterdir():
        log.unlink()
    try:
        compile_it()
    except Exception as error:  # The table shows any error.
        return Assembled(f"FAILED {type(error).__name__}: {error}".splitlines()[0][:160], [])
    found, loops = [], []
    logs = {log: log.read_text() for log in (SCRATCH / "logs").glob("[0-9]*[0-9]")}
    # The kernel that combines the parts of decodes comes last.
    for log, text in sorted(logs.items(), key=lambda item: "'paged_join" in item[1]):
        if not re.search(r"'(paged|grouped)_", text):
            continue
        registers = re.findall(r"Used (\d+) registers", text)
        spills = re.findall(r"frame, (\d+) bytes spill stores, (\d+) bytes spill loads", text)
        spilled = sum(int(bytes_) for both in spills for bytes_ in both)
        # The reasons for it are C7508 to C7518.
        serial = ", wgmma serialised" if "instructions are serialized" in text else ""
        found.append(f"{'/'.join(registers)}{f', {spilled} B' if spilled else ''}{serial}")
        if disassembler() and (loop := tile_loop(disassemble(log.with_suffix(".cubin")))):
            loops.append(loop)
    return Assembled("; ".join(found) or "FAILED: no kernel was compiled", loops)


def kernel(variant: Variant, gpu: str) -> Assembled:
    """Compile a kernel for one GPU.

    Mosaic assembles all kernels of a process for the GPU of the first one.
    """
    if not variant.name.startswith("ampere"):
        return compiled_here(variant, gpu)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as processes:
        return processes.submit(compiled_by_name, variant.name, gpu).result()


def compiled_by_name(name: str, gpu: str) -> Assembled:
    """Compile the kernel with this name, in a process that has not compiled any yet."""
    install_ptxas()
    (variant,) = (variant for variant in ampere_variants() if variant.name == name)
    return compiled_here(variant, gpu)


def compiled_here(variant: Variant, gpu: str) -> Assembled:
    """Compile a kernel for one GPU in this process."""
    (device,) = devices(gpu)
    where = SingleDeviceSharding(device)
    jitted = jax.jit(variant.run, in_shardings=where, out_shardings=where)
    with jax.default_device(device):
        return assembled(lambda: jitted.trace(*variant.arguments).lower().compile(USE_PTXAS))


def steps(gpu: str, kv_cache_dtype: Any, count: int) -> str:
    """Compile all of an engine's steps, and tell whether they write pages in place."""
    with tempfile.TemporaryDirectory() as folder:
        config = LLAMA_3_8B | {"num_hidden_layers": LAYERS, "model_type": "llama"}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        checkpoint = open_checkpoint(folder, "dummy")
    options = EngineOptions(
        load_format="dummy",
        dtype="bfloat16",
        kv_cache_dtype=kv_cache_dtype,
        num_pages=2000,
        tensor_parallel_size=count,
    )
    everything = Layers(0, LAYERS, LAYERS)
    plan = planning.make_plan(checkpoint.config, options, devices(gpu, count), everything, 0)
    compiled = CompiledStep(plan)
    copied = 0
    try:
        with jax.default_device(plan.devices[0]):
            for shape in plan.limits.shapes():
                layers, *_ = compiled.compile_parts(Key(shape, SamplerShape()))
                memory = layers.memory_analysis()
                assert memory
                array = max(x.size * x.dtype.itemsize for x in jax.tree.leaves(plan.pages))
                in_place = memory.alias_size_in_bytes >= plan.kv_bytes
                copied += not in_place or memory.temp_size_in_bytes >= array
    except Exception as error:  # The table shows any error.
        return f"FAILED {type(error).__name__}: {error}".splitlines()[0][:160]
    if copied:
        return f"FAILED: {copied} steps copy pages"
    return f"{len(list(plan.limits.shapes()))} steps, {plan.config.kernels} attention"


@click.command()
@click.option("--only", default="", help="Kernels whose names contain this; no steps then.")
def main(only: str) -> None:
    """Print the tables."""
    install_ptxas()
    failed = 0 if only else print_steps()
    every = [*variants(), *ampere_variants()]
    failed += print_kernels([variant for variant in every if only in variant.name])
    print(f"\n{failed} failed", file=sys.stderr)
    sys.exit(min(failed, 1))


def print_steps() -> int:
    """Print the steps' table; return how many failed."""
    # An absent GPU cannot report its memory.
    planning._memory = lambda *_: (2**36, 2**36)
    print(f"| jax {jax.__version__}: steps | {' | '.join(GPUS)} |")
    print("|---|" + "---|" * len(GPUS))
    failed = 0
    for kv_cache_dtype, count in (("auto", 1), ("auto", 2), ("int8", 1)):
        found = [steps(gpu, kv_cache_dtype, count) for gpu in GPUS]
        failed += sum(how.startswith("FAILED") for how in found)
        print(f"| {kv_cache_dtype}, {count} devices | {' | '.join(found)} |", flush=True)
    return failed


def print_kernels(chosen: list[Variant]) -> int:
    """Print the kernels' tables; return how many failed."""
    print(f"\n| registers, spilled bytes | {' | '.join(GPUS)} |")
    print("|---|" + "---|" * len(GPUS))
    failed, loops = 0, []
    for variant in chosen:
        found = {gpu: kernel(variant, gpu) for gpu in GPUS if gpu in variant.gpus}
        cells = [found[gpu].registers if gpu in found else "-" for gpu in GPUS]
        failed += sum(how.startswith("FAILED") for how in cells)
        print(f"| {variant.name} | {' | '.join(cells)} |", flush=True)
        loops += [(f"{variant.name}, {gpu}", x) for gpu, one in found.items() for x in one.loops]
    if loops:
        print(f"\n| loop over tiles | {' | '.join(loops[0][1])} |")
        print("|---|" + "---|" * len(loops[0][1]))
    for name, loop in loops:
        print(f"| {name} | {' | '.join(map(str, loop.values()))} |")
    return failed


if __name__ == "__main__":
    main()
