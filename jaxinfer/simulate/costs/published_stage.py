"""Step times from operators as aiconfigurator publishes them."""

from functools import lru_cache

from jaxinfer.config.costs import SimulateOptions
from jaxinfer.config.published import PublishedTables
from jaxinfer.config.stage_part import StagePart
from jaxinfer.errors import JaxinferError
from jaxinfer.files.shipped import data_path
from jaxinfer.simulate.costs.piecewise_linear import PiecewiseLinear
from jaxinfer.simulate.costs.tables import AttentionTable, OperatorTables, TableStage
from jaxinfer.simulate.published.convert import Wanted
from jaxinfer.simulate.published.kept import operator_points


def published_stage(tables: PublishedTables, part: StagePart, costs: SimulateOptions) -> TableStage:
    """Make one pipeline stage.

    Raises:
        JaxinferError: the folder has no such engine or version, or lacks what the model needs.
    """
    fp8 = "fp8_block" if tables.fp8 == "block" else "fp8"
    if not data_path(tables.folder).is_dir():
        raise JaxinferError(f"{tables.folder}: no such folder")
    wanted = Wanted(
        data_path(tables.folder), tables.backend, tables.version, tables.card, part.kind,
        part.model, part.devices,
        "bfloat16" if part.weight_size > 1 else fp8,
        "bfloat16" if part.kv_size > 1 else "fp8",
        tables.static_scales, tables.quickest_all_reduce, tables.small_operators,
        tables.expert_parallel, tables.routing,
    )  # fmt: skip
    where = f"{tables.folder}, {tables.backend} {tables.version}"
    stage = TableStage.of(_operators(wanted), where, part, costs)
    stage.read["files"] = operator_points(wanted).files
    return stage


@lru_cache(maxsize=64)
def _operators(wanted: Wanted) -> OperatorTables:
    """Make curves once, as long as the process runs."""
    found = operator_points(wanted)
    points = {(c, key, 0.0, 0.0): micros for (c, key), micros in found.chunks.items()}
    points |= {(0.0, 0.0, n, k): micros for (n, k), micros in found.decodes.items()}
    dense = {name: PiecewiseLinear(curve) for name, curve in found.dense.items()}
    heads = {name: PiecewiseLinear(curve) for name, curve in found.heads.items()}
    return OperatorTables(dense, heads, AttentionTable(points, keyed=True), ())
