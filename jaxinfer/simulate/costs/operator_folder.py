"""Writes and checks the folder of ``profile --operators``, which ``simulate.tables`` reads.

A folder has ``meta.yaml`` and, for each degree of tensor parallelism, ``tpN/`` with the tables and
``tpN.yaml``, a run file of the engine that was measured.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from rich.table import Table

from jaxinfer.config.costs import SimulateOptions
from jaxinfer.config.stage_part import StagePart
from jaxinfer.hardware.catalogue import Gpu, ModelShape
from jaxinfer.simulate.costs.measured_steps import MeasuredTables, padded_tokens
from jaxinfer.steps.shapes import StepLimits
from jaxinfer.steps.times import Part, work_of_parts

# A kind of steps with a larger median error than this is named.
TOLERANCE = 0.05
# Fields on which no measured time depends.
_OF_NO_TIME = {"stored_bits", "wide_layers", "max_position_embeddings"}
_PADDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


@dataclass(frozen=True)
class Degree:
    """The conditions under which one degree of tensor parallelism was measured.

    Attributes:
        model: shape of the model, padded to the devices.
        options: options of the engine, as in a run file.
        over_devices: whether layers were measured with their all-reduces.
        host_s: seconds per step and per sequence for launching, while the device waits.
        layers: number of layers of the model whose steps are checked.
        checks: seconds of these steps.
        spread: spread of the rounds.
    """

    devices: int
    model: ModelShape
    options: Mapping[str, Any]
    limits: StepLimits
    over_devices: bool
    host_s: tuple[float, float]
    layers: int
    checks: Mapping[tuple[Part, ...], float]
    spread: float


def write_meta(
    folder: Path, device: str, degrees: Sequence[Degree], facts: Mapping[str, Any]
) -> None:
    """Write ``meta.yaml``.

    Args:
        device: kind of the device, as JAX or ``configs/gpus.yaml`` names it.
        facts: other facts that affect the times, for readers of the file.
    """
    first = degrees[0]
    sizes = first.model.model_dump(exclude={"num_hidden_layers", "gated", *_OF_NO_TIME})
    sizes["head_dim"] = first.model.head_size
    engine = {
        "row_buckets": first.limits.row_buckets,
        "token_buckets": padded_tokens(first.limits),
        "collectives": {each.devices: each.over_devices for each in degrees},
        "padded": {
            each.devices: {
                name: value
                for name in _PADDED
                if (value := getattr(each.model, name)) != sizes[name]
            }
            for each in degrees
        },
    }
    meta = {
        "hardware": device,
        "engine_effective": {"hf_overrides": sizes},
        "engine": engine,
        "measured": dict(facts),
    }
    (folder / "meta.yaml").write_text(yaml.safe_dump(meta, sort_keys=False), encoding="utf-8")


def write_run_file(folder: Path, name: str, device: str, gpu: Gpu | None, degree: Degree) -> Path:
    """Write a run file of the engine that was measured, for ``simulate``.

    Args:
        name: name of the model.
        gpu: the device's numbers, if ``configs/gpus.yaml`` does not have it.
    """
    own = f"{name}-tp{degree.devices}"
    step_s, sequence_s = (0.0, 0.0) if degree.options["launch_ahead"] else degree.host_s
    costs = {"tables": str(folder), "step_s": step_s, "sequence_s": sequence_s}
    data: dict[str, Any] = {
        "model": own,
        "models": {own: degree.model.model_dump(exclude=_OF_NO_TIME)},
        "engine": dict(degree.options),
        "groups": {"measured": {"kind": device, "devices": degree.devices}},
        "instances": {"engine": {"group": "measured"}},
        "system": "single",
        "simulate": {key: value for key, value in costs.items() if value},
    }
    if gpu:
        data["gpus"] = {device: gpu.model_dump(exclude_none=True, exclude_defaults=True)}
    path = folder / f"tp{degree.devices}.yaml"
    head = f"# jaxinfer simulate {path} --workload TRACE: as measured on {device}.\n"
    path.write_text(head + yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    return path


@dataclass(frozen=True)
class Check:
    """Whole steps compared with the sums of their parts.

    Attributes:
        kind: kind of steps.
        off: (sum - measured) / measured for each step.
    """

    devices: int
    kind: str
    off: Sequence[float]

    @property
    def middle(self) -> float:
        """Median of ``off``."""
        return median(self.off)

    @property
    def adds_up(self) -> bool:
        """True if the median is within ``TOLERANCE`` of 0."""
        return abs(self.middle) <= TOLERANCE


def check_steps(folder: Path, device: str, gpu: Gpu, degree: Degree) -> Iterator[Check]:
    """Compare measured times of whole steps, which are in no table, with sums from the tables."""
    part = StagePart(
        gpu, device, degree.model, degree.layers, 1.0, True, True, degree.devices, 2, 2,
        degree.limits,
    )  # fmt: skip
    stage = MeasuredTables.of(part, SimulateOptions(tables=str(folder)))
    kinds: dict[str, list[float]] = {}
    for parts, seconds in degree.checks.items():
        work = work_of_parts(parts)
        shape = degree.limits.smallest(work.singles, work.tokens, work.sampled)
        kind = f"{shape.tokens} tokens, {'with' if work.singles else 'without'} decodes"
        if not work.chunks:
            kind = f"{shape.rows} decodes"
        kinds.setdefault(kind, []).append(stage.seconds(work) / seconds - 1)
    for kind, off in kinds.items():
        yield Check(degree.devices, kind, off)


def check_table(checks: Sequence[Check]) -> Table:
    """Return a table with a line per kind of steps."""
    table = Table(title="Parts beside whole steps", title_justify="left", box=None, pad_edge=False)
    for column in ("devices", "steps of", "measured", "sum of parts, median", "least", "most"):
        table.add_column(column, justify="left" if column == "steps of" else "right")
    for check in checks:
        ends = (f"{value:+.1%}" for value in (check.middle, min(check.off), max(check.off)))
        table.add_row(str(check.devices), check.kind, str(len(check.off)), *ends)
    return table
