"""Collectives in a module's text, in all ways that XLA writes them."""

import pytest

from jaxinfer.lab.sharding.hlo import counts

LISTED = "replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%add"
IOTA = "replica_groups=[2,4]<=[8], dimensions={1}"
TURNED = "replica_groups=[4,2]<=[2,4]T(1,0), use_global_device_ids=true"
MESH = "replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}, dimensions={0}"
ORDERED = (
    "replica_groups=mesh['axis_0'=1,'axis_1'=4,'axis_2'=2], "
    "device_ids=([2,4]T(1,0)) {'axis_1'}, use_global_device_ids=true"
)
PART = "replica_groups=mesh['axis_0'=8] {'axis_0':(2)4}, dimensions={0}"


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (f"%a = f32[8,16]{{1,0}} all-reduce(%x), {LISTED}", {"all-reduce": (1, 128)}),
        (f"%a = f32[8,16]{{1,0}} all-gather(%x), {IOTA}", {"all-gather": (1, 96)}),
        (f"%a = f32[8,16]{{1,0}} all-gather(%x), {TURNED}", {"all-gather": (1, 64)}),
        (f"%a = f32[8,16]{{1,0}} all-gather(%x), {MESH}", {"all-gather": (1, 96)}),
        (f"%a = f32[8,16]{{1,0}} all-reduce(%x), {ORDERED}", {"all-reduce": (1, 192)}),
        (f"%a = bf16[8,16]{{1,0}} all-gather(%x), {PART}", {"all-gather": (1, 96)}),
        # What has been put together is taken apart.
        (
            f"%a = (f32[2,4]{{1,0}}, f32[8]{{0}}) all-reduce(%x, %y), {LISTED}",
            {"all-reduce": (2, 16)},
        ),
        # A reduce-scatter's result is a piece of an array; an all-to-all's pieces are one.
        (f"%a = f32[2,4]{{1,0}} reduce-scatter(%x), {IOTA}", {"reduce-scatter": (1, 24)}),
        (
            "%a = (f32[2]{0}, f32[2]{0}, f32[2]{0}, /*index=3*/f32[2]{0}) "
            f"all-to-all(%x, %y, %z, /*index=3*/%w), {IOTA}",
            {"all-to-all": (1, 6)},
        ),
        # What has begun has its operand beside its result.
        (
            f"%a = (f32[2,4]{{1,0}}, f32[8,4]{{1,0}}) all-gather-start(%x), {IOTA}",
            {"all-gather": (1, 24)},
        ),
        (
            "%a = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%x), "
            "source_target_pairs={{0,1},{1,0}}",
            {"collective-permute": (1, 8)},
        ),
        ("%a = f32[8,4]{1,0} all-gather-done(%x)", {}),
        ("%a = f32[8]{0} all-reduce(%x), replica_groups={{0},{1}}, to_apply=%add", {}),
        ("%f = f32[8]{0} fusion(%all-reduce.1), kind=kLoop", {}),
    ],
)
def test_each_way_to_write_a_collective(line: str, found: dict[str, tuple[int, float]]) -> None:
    assert counts(f"ENTRY %main {{\n  {line}\n}}") == found


def test_a_kernel_that_reduces_and_scatters_on_tpus() -> None:
    text = f"""%all-reduce-scatter.1 (input: bf16[8,16]) -> bf16[8,4] {{
  %all-reduce.2 = bf16[8,16]{{1,0:T(8,128)(2,1)}} all-reduce(%input), {MESH}
  ROOT %slice = bf16[8,4]{{1,0}} dynamic-slice(%all-reduce.2, %zero, %at)
}}

ENTRY %main {{
  %all-reduce.3 = bf16[8,16]{{1,0}} all-reduce(%x), {MESH}
  ROOT %fusion = bf16[8,4]{{1,0}} fusion(%y), kind=kCustom, calls=%all-reduce-scatter.1
}}"""
    assert counts(text) == {"reduce-scatter": (1, 96), "all-reduce": (1, 192)}


def test_the_steps_of_one_channel_count_once() -> None:
    gather = "bf16[8,16]{1,0} all-gather(%x), channel_id"
    lines = [
        f"  %all-gather.{n} = {gather}={channel}, {MESH}" for n, channel in enumerate((1, 1, 2))
    ]
    assert counts("\n".join(lines)) == {"all-gather": (2, 192)}


def test_what_programs_ask_for_has_one_channel() -> None:
    asked = f"f32[8,16]{{1,0}} all-gather(%x), channel_id=1, {MESH}, metadata={{op_name="
    lines = [f'  %all-gather.{n} = {asked}"jit(f)/shard_map/all_gather"}}' for n in range(2)]
    assert counts("\n".join(lines)) == {"all-gather": (2, 192)}
