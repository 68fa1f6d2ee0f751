"""``jaxinfer profile --operators``: a folder of tables for ``simulate.tables``."""

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console

from jaxinfer.checkpoints.checkpoint import open_checkpoint
from jaxinfer.checkpoints.modelled import shape_of_config
from jaxinfer.config.run_file import RunFile
from jaxinfer.errors import JaxinferError
from jaxinfer.hardware.catalogue import Gpu, name_of_device
from jaxinfer.lab.operators.measure import (
    ROUNDS,
    MeasuredDegree,
    choose_depths,
    measure_operators,
    the_instance,
)
from jaxinfer.report.comparison import new_folder
from jaxinfer.report.progress import LoadProgress
from jaxinfer.runtime.stage.devices import count_cpu_devices
from jaxinfer.runtime.stage.machine_speed import copy_rate, product_rate
from jaxinfer.simulate.costs.operator_folder import (
    Check,
    Degree,
    check_steps,
    check_table,
    write_meta,
    write_run_file,
)
from jaxinfer.steps.operators import write_operators

# Options of an engine that decide the times and shapes of steps, and options by which a run is
# scheduled.
_OPTIONS = (
    "page_size", "max_num_seqs", "max_num_batched_tokens", "token_buckets", "max_model_len",
    "enable_prefix_caching", "launch_ahead", "chunks_in_flight", "watermark", "kv_cache_dtype",
)  # fmt: skip
# Sizes of a copy in bytes, and of a product's matrices, that are measured on an unknown device.
_COPY, _PRODUCT = 1 << 28, 2048


class WrittenTables(NamedTuple):
    """Tables that were written, and how well their parts add up to whole steps."""

    degrees: Sequence[Degree]
    checks: Sequence[Check]
    run_file: Path


def profile_operators(
    config: RunFile, degrees: Sequence[int], layers: tuple[int, int] | None, out: Path
) -> WrittenTables:
    """Measure, write and check tables in a new folder.

    Raises:
        JaxinferError: see ``the_instance``, ``choose_depths`` and ``measure_operators``.
    """
    cluster, name = config.cluster(), config.require_model()
    instance = cluster.instances[the_instance(cluster)]
    place = instance.places[0].group
    group = cluster.groups[place]
    most = group.model_copy(update={"devices": max(degrees), "tensor_parallel_size": None})
    count_cpu_devices([cluster.model_copy(update={"groups": {place: most}})])
    checkpoint = open_checkpoint(name, "dummy")
    if instance.weight_dtype != "auto" or checkpoint.config.stored_bits:
        found_bits = checkpoint.config.stored_bits or instance.weight_dtype
        raise JaxinferError(
            f"weights are of {found_bits}: tables have times of weights of 16 or 32 bits, leave "
            "weight_dtype auto and take a checkpoint without scales"
        )
    depths = choose_depths(checkpoint.config, layers)
    new_folder(out)
    found: list[Degree] = []
    checks = []
    with LoadProgress(True) as bar:
        for devices in degrees:
            measured = measure_operators(checkpoint, cluster, devices, depths, bar.update)
            kind = measured.engine.plan.devices[0].device_kind
            write_operators(out / f"tp{devices}", measured.operators)
            found.append(_degree(devices, measured))
    device, gpu = name_of_device(kind)
    own = None if gpu else _numbers(group.platform)
    write_meta(out, device, found, _facts(name, measured, depths, found))
    for degree in found:
        written = write_run_file(out, Path(name).name, device, own, degree)
        checks += list(check_steps(out, device, gpu or own, degree))  # type: ignore[arg-type]
    return WrittenTables(found, checks, written)


def operator_figures(found: WrittenTables) -> dict[str, Any]:
    """Return the relative differences between sums of parts and whole steps, and between rounds."""
    checks = [{"devices": c.devices, "steps": c.kind, "median_off": c.middle} for c in found.checks]
    spread = {degree.devices: degree.spread for degree in found.degrees}
    return {"run_file": found.run_file, "checks": checks, "spread": spread}


def show_operators(found: WrittenTables, out: str) -> None:
    """Print how well the parts add up to whole steps, and warn of likely causes of errors."""
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    console.print(check_table(found.checks))
    for check in found.checks:
        if not check.adds_up:
            console.print(
                f"does not add up: {check.kind} on {check.devices} device(s), by "
                f"{check.middle:+.1%}",
                soft_wrap=True,
            )
    for degree in found.degrees:
        if degree.spread > 0.05:
            console.print(
                f"rounds of {degree.devices} device(s) differ by {degree.spread:.0%}: others use "
                "the machine; measure again when it is quiet",
                soft_wrap=True,
            )
    command = f"jaxinfer simulate {found.run_file} --workload TRACE"
    console.print(f"tables: {out}; {command}", soft_wrap=True)


def _degree(devices: int, measured: MeasuredDegree) -> Degree:
    plan = measured.engine.plan
    options = plan.options.model_dump(include=set(_OPTIONS))
    options = {key: value for key in _OPTIONS if (value := options[key]) is not None}
    if "token_buckets" in options:
        options["token_buckets"] = list(options["token_buckets"])
    options |= {"max_model_len": plan.max_model_len, "num_pages": plan.num_pages}
    if policies := plan.options.policies.model_dump(mode="json", exclude_defaults=True):
        options["policies"] = policies
    model = shape_of_config(measured.model)
    return Degree(
        devices,
        model,
        options,
        plan.limits,
        measured.over_devices,
        measured.host_s,
        measured.depths[1],
        measured.checks,
        measured.spread,
    )


def _numbers(platform: str | None) -> Gpu:
    """Measure, as far as possible, the numbers of a device that ``configs/gpus.yaml`` lacks."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return Gpu(
        bf16_tflops=round(product_rate(_PRODUCT) / 1e12, 4),
        memory_gb=round(memory, 2),
        memory_gb_s=round(copy_rate(_COPY) / 1e9, 2),
        link="memory",
        link_gb_s=1.0,
    )


def _facts(
    name: str, measured: MeasuredDegree, depths: tuple[int, int], found: Sequence[Degree]
) -> dict[str, Any]:
    plan = measured.engine.plan
    return {
        "model": name,
        "dtype": plan.dtype.name,
        "kv_dtype": plan.kv_dtype.name,
        "kernels": plan.config.kernels,
        "page_size": plan.limits.page_size,
        "layers": list(depths),
        "rounds": ROUNDS,
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
        "jaxinfer": version("jaxinfer"),
        "cores": os.cpu_count(),
        "host_s": {d.devices: [round(s, 7) for s in d.host_s] for d in found},
        "spread": {d.devices: round(d.spread, 4) for d in found},
    }
