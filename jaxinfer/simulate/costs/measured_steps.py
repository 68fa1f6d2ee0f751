"""Step times from a profile of the engine's compiled steps, made by ``profile --operators``.

In addition to the files that ``table_files.py`` reads, ``meta.yaml`` has a section ``engine`` with
the sizes that steps are padded to. For these sizes, ``dense.csv`` has the times of ``layer`` and
``step`` (the step's time without layers and head) and, for steps with only decodes,
``decode_layer`` and ``decode_step``. ``per_sequence.csv`` has ``head``, by the padded number of
rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import Field

from jaxinfer.config.costs import SimulateOptions
from jaxinfer.config.published import shipped_tables
from jaxinfer.config.stage_part import StagePart
from jaxinfer.errors import JaxinferError
from jaxinfer.files.shipped import data_path
from jaxinfer.hardware.catalogue import ITEMSIZE, Gpu, ModelShape
from jaxinfer.options.validation import Options, within
from jaxinfer.serving.batch import Work
from jaxinfer.simulate.costs.published_stage import published_stage
from jaxinfer.simulate.costs.table_files import (
    attention_points,
    check_meta,
    find_degree,
    named_points,
)
from jaxinfer.simulate.costs.tables import AttentionTable, Collectives, TableStage, rings
from jaxinfer.simulate.published.files import is_published
from jaxinfer.steps.shapes import StepLimits

DENSE = ("layer", "step", "decode_layer", "decode_step")


class Profiled(Options):
    """Section ``engine`` of ``meta.yaml``.

    Attributes:
        row_buckets: Sizes to which steps with only decodes were padded.
        token_buckets: Sizes to which steps with prefill were padded.
        collectives: For each degree of tensor parallelism, whether the layers were measured on as
            many devices, so that their times include all-reduces.
        padded: Sizes that the model was padded to, by degree.
    """

    row_buckets: tuple[int, ...] = Field(min_length=1, strict=False)
    token_buckets: tuple[int, ...] = Field(min_length=1, strict=False)
    collectives: dict[int, bool]
    padded: dict[int, dict[str, int]] = Field(default_factory=dict)


@dataclass(frozen=True)
class ProgramStage:
    """Step times of a pipeline stage: each step takes as long as the compiled step it is padded to.

    Attributes:
        limits: limits that decide the shape of a step.
        dense: microseconds of each operator, by tokens.
        heads: microseconds of the head, by rows, if the stage has it.
        read: contents of the tables, as JSON values.
    """

    limits: StepLimits
    layers: int
    dense: Mapping[str, Mapping[float, float]]
    heads: Mapping[float, float] | None
    attention: AttentionTable
    collectives: Collectives
    step_s: float
    sequence_s: float
    read: Mapping[str, object]

    @classmethod
    def open(
        cls, tp: Path, engine: Mapping[str, Any], part: StagePart, step_s: float, sequence_s: float
    ) -> Self:
        """Make the stage from a folder such as ``tp1``.

        Args:
            engine: the section ``engine`` of ``meta.yaml``.

        Raises:
            JaxinferError: a table is missing or incomplete, or comes from an engine that pads its
                steps differently.
        """
        meta = tp.parent / "meta.yaml"
        try:
            profiled = Profiled.model_validate(engine)
            _check_buckets(profiled, part)
        except JaxinferError as error:
            raise JaxinferError(f"{meta}: {within('engine', error)}") from None
        assert part.limits
        dense = named_points(tp, "dense", DENSE)
        heads = named_points(tp, "per_sequence", ("head",))["head"]
        rows, tokens = part.limits.row_buckets, padded_tokens(part.limits)
        for name, found, wanted in (
            *((name, dense[name], tokens) for name in DENSE[:2]),
            *((name, dense[name], rows) for name in DENSE[2:]),
            ("head", heads, rows),
        ):
            if missing := [size for size in wanted if size not in found]:
                raise JaxinferError(f"{tp}: {name} lacks steps that are padded to {missing[0]}")
        points, keyed = attention_points(tp)
        try:
            attention = AttentionTable(points, keyed)
        except JaxinferError as error:
            raise JaxinferError(f"{tp}: attention.csv {error}") from None
        measured = profiled.collectives.get(part.devices, True)
        read = {
            "folder": str(tp),
            "row_buckets": rows,
            "token_buckets": tokens,
            "attention": len(points),
            "all_reduces": "measured" if measured else "modelled",
        }
        return cls(
            part.limits,
            part.layers,
            dense,
            heads if part.last else None,
            attention,
            Collectives() if measured else _all_reduces(part.gpu, part.model, part),
            step_s,
            sequence_s,
            read,
        )

    def seconds(self, work: Work) -> float:
        """Return the seconds of one step."""
        shape = self.limits.smallest(work.singles, work.tokens, work.sampled)
        kind = "" if shape.chunks else "decode_"
        each = self.dense[f"{kind}layer"][shape.tokens] + self.attention(work)
        micros = self.layers * each + self.dense[f"{kind}step"][shape.tokens]
        if self.heads:
            micros += self.heads[shape.rows]
        seconds = micros * 1e-6 + self.step_s + self.sequence_s * work.sequences
        return seconds + self.collectives.seconds(work)


def padded_tokens(limits: StepLimits) -> list[int]:
    """Return the numbers of tokens to which steps with prefill are padded."""
    return sorted({shape.tokens for shape in limits.shapes() if shape.chunks})


def _check_buckets(profiled: Profiled, part: StagePart) -> None:
    if part.limits is None:
        raise JaxinferError("this planner knows no engine that these times are of")
    for name, measured, ours in (
        ("row_buckets", profiled.row_buckets, part.limits.row_buckets),
        ("token_buckets", profiled.token_buckets, padded_tokens(part.limits)),
    ):
        if lacking := [size for size in ours if size not in measured]:
            raise JaxinferError(
                f"{name} are {list(measured)}, the instance's steps are padded to {lacking[0]}: "
                "take the engine options that were profiled, or profile with these"
            )


def _all_reduces(gpu: Gpu, model: ModelShape, part: StagePart) -> Collectives:
    """Model two all-reduces per layer; each device has the whole embedding and head."""
    return rings(gpu, model, part.devices, ITEMSIZE, part.layers, False, False)


class MeasuredTables:
    """Stages with costs from ``simulate.tables``: of operators, or of an engine's own steps."""

    @staticmethod
    def of(part: StagePart, costs: SimulateOptions) -> TableStage | ProgramStage:
        """Make the stage from a run file's options, which must have ``tables``.

        Raises:
            JaxinferError: the folder belongs to another model or GPU; see ``TableStage.open``,
                ``ProgramStage.open`` and ``published_stage``.
        """
        assert costs.tables
        if costs.skew and not isinstance(costs.tables, str):
            raise JaxinferError("published tables have no skew_fit.csv: leave out skew")
        if not isinstance(costs.tables, str):
            return published_stage(costs.tables, part, costs)
        folder = data_path(costs.tables)
        if not folder.is_dir():
            known = ", ".join(shipped_tables())
            raise JaxinferError(f"{costs.tables}: no such folder, and none that ships: {known}")
        if part.model.windowed_layers:
            raise JaxinferError(f"{folder}: has no times of layers with windows")
        if part.weight_size != ITEMSIZE:
            raise JaxinferError(
                f"{folder}: has times of weights of 16 bits: leave out weight_dtype, or the tables"
            )
        if not (folder / "meta.yaml").exists() and is_published(folder):
            raise JaxinferError(
                f"{folder}: has published operators of several engines: give tables as "
                "{folder: ..., backend: ..., version: ...}"
            )
        meta = check_meta(folder, part.model, part.kind, part.devices)
        if (engine := meta.get("engine")) is None:
            return TableStage.open(folder, part, costs)
        if costs.skew:
            raise JaxinferError(f"{folder}: whole steps were measured, with no skew_fit.csv")
        tp = find_degree(folder, part.devices)
        return ProgramStage.open(tp, engine, part, costs.step_s, costs.sequence_s)
