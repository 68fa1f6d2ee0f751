"""Tables of a plan for the terminal."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from rich.table import Table

from jaxinfer.runtime.explain import (
    StepCost,
    longest_request,
    parameter_groups,
    weight_bytes_per_device,
)
from jaxinfer.runtime.stage.stage_plan import StagePlan


def plan_tables(plan: StagePlan, costs: list[StepCost]) -> Iterator[Table]:
    """Yield tables of a plan's parameters, memory and step costs."""
    yield _parameters(plan)
    yield _memory(plan)
    yield _steps(plan, costs)


def plan_figures(plan: StagePlan, costs: list[StepCost]) -> dict[str, Any]:
    """Return the numbers in ``plan_tables``; sizes are in bytes."""
    limits = plan.limits
    return {
        "layers": [plan.layers.start, plan.layers.stop - 1],
        "parameters": parameter_groups(plan),
        "devices": len(plan.devices),
        "weight_bytes_per_device": weight_bytes_per_device(plan),
        "weight_bytes": plan.weight_bytes,
        "kv_bytes": plan.kv_bytes,
        "free_bytes": plan.memory_bytes,
        "pages": plan.num_pages - 1,
        "page_size": limits.page_size,
        "largest_step": {"tokens": limits.max_num_batched_tokens, "requests": limits.max_num_seqs},
        "longest_request": longest_request(plan),
        "steps": [asdict(cost) | {"shape": cost.shape._asdict()} for cost in costs],
    } | ({"ffn_weight_bytes_per_device": weight_bytes_per_device(plan.ffn)} if plan.ffn else {})


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def _parameters(plan: StagePlan) -> Table:
    table = _table(
        "Parameters", "path", "count", "shape", "dtype", "mesh axes", "all", "per device"
    )
    for group in parameter_groups(plan):
        table.add_row(
            group.path,
            str(group.count),
            "x".join(map(str, group.shape)),
            group.dtype,
            group.spec,
            mib(group.total_bytes),
            mib(group.device_bytes),
        )
    return table


def _memory(plan: StagePlan) -> Table:
    table = _table("Memory", "", "")
    pages, size = plan.num_pages - 1, plan.limits.page_size
    devices = len(plan.devices)
    on = "of the host" if plan.devices[0].platform == "cpu" else "of each device"
    table.add_row("devices", f"{devices} x {plan.devices[0].device_kind}")
    table.add_row("weights per device", mib(weight_bytes_per_device(plan)))
    table.add_row(f"weights, {on}", mib(plan.weight_bytes))
    table.add_row(f"KV pages, {on}", mib(plan.kv_bytes))
    free = "not known" if plan.memory_bytes is None else mib(plan.memory_bytes)
    table.add_row(f"free, {on}", free)
    table.add_row("KV pages", f"{pages:,} of {size} tokens, {pages * size:,} tokens")
    for place in plan.attention:
        if place.number:
            continue  # The same as on the group's first device.
        pages = place.num_pages - 1
        all_bytes = place.devices * place.kv_bytes
        what = f"{pages:,} of {size} tokens, {pages * size:,} tokens, {mib(all_bytes)}"
        kind = place.device.device_kind if place.device else "device elsewhere"
        table.add_row(f"KV pages of {place.group}, {place.devices} x {kind}", what)
    if ffn := plan.ffn:
        what = f"FFN of the layers, {len(ffn.devices)} x {ffn.devices[0].device_kind}"
        table.add_row(what, f"{mib(weight_bytes_per_device(ffn))} of weights per device")
    step = f"{plan.limits.max_num_batched_tokens:,} tokens of {plan.limits.max_num_seqs:,} requests"
    table.add_row("largest step", step)
    table.add_row("longest request", f"{longest_request(plan):,} tokens")
    return table


def _steps(plan: StagePlan, costs: list[StepCost]) -> Table:
    buckets = len(plan.limits.shapes())
    samplers = len(plan.limits.row_buckets)
    table = _table(
        f"Steps: {buckets} shapes and {samplers} samplers to compile",
        "tokens",
        "rows",
        "activations",
        "collectives per device",
        "compiled in",
    )
    for cost in costs:
        table.add_row(
            str(cost.shape.tokens),
            str(cost.shape.rows),
            mib(cost.temporary_bytes),
            _collectives(cost.collectives),
            f"{cost.compile_s:.1f} s",
        )
    return table


def layouts_table(records: list[dict[str, Any]]) -> Table:
    """Return a table of the records that ``measure.compare_layouts`` returns."""
    table = _table(
        "Layouts on one workload: medians",
        "layout",
        "weights per device",
        "wall",
        "to the first",
        "step with prefill",
        "step of decodes",
        "collectives of the largest step",
        "of the largest step of decodes",
    )
    for record in records:
        table.add_row(
            record["layout"],
            mib(record["weight_bytes_per_device"]),
            f"{record['wall_s_median']:.2f} s",
            f"{record['wall_s_median'] / records[0]['wall_s_median']:.2f}",
            _ms(record["prefill_step_s"]),
            _ms(record["decode_step_s"]),
            _collectives(record["largest_step"]["collectives"]),
            _collectives(record["largest_decode_step"]["collectives"]),
        )
    return table


def _collectives(found: Mapping[str, tuple[int, int]]) -> str:
    return "; ".join(f"{n} {kind}, {mib(size)}" for kind, (n, size) in found.items()) or "none"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f} ms"


def mib(size: int) -> str:
    """Return bytes as a text in MiB."""
    return f"{size / 2**20:,.1f} MiB"
