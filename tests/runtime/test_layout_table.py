"""Tables of a plan, and of sharding rules side by side."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.table import Table

from jaxinfer.runtime.explain import StepCost
from jaxinfer.runtime.layout_table import layouts_table, mib, plan_tables
from jaxinfer.runtime.stage.stage_plan import StagePlan
from jaxinfer.steps.shapes import StepLimits, StepShape

MIB = 2**20


def rows(table: Table) -> list[tuple[str, ...]]:
    """Cells, row by row."""
    return list(zip(*(map(str, column.cells) for column in table.columns), strict=True))


def plan(devices: int) -> StagePlan:
    """Two layers' matrices of 1 MiB, split if there are two devices, and a norm for each."""
    mesh = Mesh(jax.devices()[:devices], ("x",))
    split, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((None, "x"), ()))
    parameters = {
        f"layers.{layer}.{name}": jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
        for name, shape, sharding in (("up", (512, 512), split), ("norm", (1024, 256), whole))
        for layer in range(2)
    }
    rest: Any = None
    return StagePlan(
        rest, rest, 2, rest, rest, rest, StepLimits(64, 512, 4, 16), num_pages=1001,
        max_model_len=20_000, weight_bytes=3 * MIB, kv_bytes=MIB // 2, memory_bytes=2000 * MIB,
        devices=list(mesh.devices.flat), mesh=mesh, graphdef=rest, parameters=parameters,
        axes=dict(mesh.shape),
    )  # fmt: skip


def test_a_plan() -> None:
    costs = [
        StepCost(
            StepShape(64, 512, 64), 5 * MIB, {"all-reduce": (4, MIB), "all-gather": (1, 0)}, 1.25
        ),
        StepCost(StepShape(64, 64, 0), MIB // 4, {}, 0.04),
    ]
    parameters, memory, steps = plan_tables(plan(2), costs)
    assert parameters.title == "Parameters"
    assert [str(column.header) for column in parameters.columns] == [
        "path",
        "count",
        "shape",
        "dtype",
        "mesh axes",
        "all",
        "per device",
    ]
    assert rows(parameters) == [
        ("layers.*.up", "2", "512x512", "float32", "-, x", "2.0 MiB", "1.0 MiB"),
        ("layers.*.norm", "2", "1024x256", "float32", "", "2.0 MiB", "2.0 MiB"),
    ]
    assert rows(memory) == [
        ("devices", "2 x cpu"),
        ("weights per device", "3.0 MiB"),
        ("weights, of the host", "3.0 MiB"),
        ("KV pages, of the host", "0.5 MiB"),
        ("free, of the host", "2,000.0 MiB"),
        ("KV pages", "1,000 of 16 tokens, 16,000 tokens"),
        ("largest step", "512 tokens of 64 requests"),
        ("longest request", "16,001 tokens"),
    ]
    assert steps.title == "Steps: 5 shapes and 3 samplers to compile"
    assert rows(steps) == [
        ("512", "64", "5.0 MiB", "4 all-reduce, 1.0 MiB; 1 all-gather, 0.0 MiB", "1.2 s"),
        ("64", "64", "0.2 MiB", "none", "0.0 s"),
    ]
    for table in (parameters, memory, steps):
        assert [column.justify for column in table.columns] == [
            "left",
            *["right"] * (len(table.columns) - 1),
        ]


def test_rules_side_by_side() -> None:
    def record(name: str, wall: float, decode: float | None) -> dict[str, Any]:
        return {
            "layout": name,
            "weight_bytes_per_device": 3 * MIB,
            "wall_s_median": wall,
            "prefill_step_s": 0.5,
            "decode_step_s": decode,
            "largest_step": {"collectives": {"all-reduce": (8, 2 * MIB)}},
            "largest_decode_step": {"collectives": {}},
        }

    found = rows(layouts_table([record("a", 2.0, 0.0012), record("b", 3.0, None)]))
    step = ("8 all-reduce, 2.0 MiB", "none")
    assert found == [
        ("a", "3.0 MiB", "2.00 s", "1.00", "500.0 ms", "1.2 ms", *step),
        ("b", "3.0 MiB", "3.00 s", "1.50", "500.0 ms", "-", *step),
    ]
    assert mib(1234 * MIB + MIB // 2) == "1,234.5 MiB"
