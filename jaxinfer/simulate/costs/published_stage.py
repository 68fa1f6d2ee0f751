"""Step times from operators that aiconfigurator publishes."""

from jaxinfer.config.costs import SimulateOptions
from jaxinfer.config.published import PublishedTables
from jaxinfer.config.stage_part import StagePart
from jaxinfer.errors import JaxinferError
from jaxinfer.files.shipped import data_path
from jaxinfer.simulate.costs.kept_operators import published_operators
from jaxinfer.simulate.costs.tables import TableStage
from jaxinfer.simulate.published.convert import Wanted


def published_stage(tables: PublishedTables, part: StagePart, costs: SimulateOptions) -> TableStage:
    """Make one pipeline stage.

    Raises:
        JaxinferError: the folder has no such engine or version, or lacks what the model needs.
    """
    if part.mean_weight_size not in (1, 2):
        raise JaxinferError(
            f"{tables.folder}: has times of layers in one format: some of the model's keep 16 bits "
            f"beside {part.model.stored_bits}"
        )
    fp8 = "fp8_block" if tables.fp8 == "block" else "fp8"
    if not data_path(tables.folder).is_dir():
        raise JaxinferError(f"{tables.folder}: no such folder")
    wanted = Wanted(
        data_path(tables.folder), tables.backend, tables.version, tables.card, part.kind,
        part.model, part.devices,
        "bfloat16" if part.weight_size > 1 else fp8,
        "bfloat16" if part.kv_size > 1 else "fp8",
        tables.static_scales, tables.quickest_all_reduce, tables.possible_attention,
        tables.other_heads, tables.small_operators, part.sharers, tables.experts,
        tables.expert_parallel, tables.routing, tables.expert_blocks,
    )  # fmt: skip
    where = f"{tables.folder}, {tables.backend} {tables.version}"
    found = published_operators(wanted)
    stage = TableStage.of(found.operators, where, part, costs)
    stage.read["files"] = found.files
    return stage
