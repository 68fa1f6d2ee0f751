"""Layouts as tables: what each puts where, on meshes of one, two and three axes."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.layouts import (
    ALL,
    FIRST,
    LAYOUTS,
    REST,
    Layout,
    Place,
    Rule,
    most_ways,
    named,
    ways,
)
from jaxinfer.models.sharding import for_use, padded, pages_sharding, place, shard

MESH = {"x": 2, "y": 4}
# Vocabulary 20, D 16, F 30, 6 query and 3 KV heads of 8.
MODEL = ModelConfig(
    "LlamaForCausalLM", 20, 16, 30, 2, 6, 3, 8, 100, 1e-5, False, None, (), (None, None)
)


def mesh_of(sizes: dict[str, int]) -> Mesh:
    count = int(np.prod([*sizes.values()]))
    return Mesh(np.array(jax.devices()[:count]).reshape(*sizes.values()), tuple(sizes))


@pytest.mark.parametrize(
    ("where", "one", "three"),
    [
        (ALL, ("x",), ("x", "y", "z")),
        (FIRST, ("x",), ("x",)),
        (REST, (), ("y", "z")),
        ((REST, FIRST), ("x",), ("y", "z", "x")),
        ("y", ("y",), ("y",)),
        (("z", "y"), ("z", "y"), ("z", "y")),
    ],
)
def test_places_on_meshes(where: Place, one: tuple[str, ...], three: tuple[str, ...]) -> None:
    assert named(where, "x") == one
    assert named(where, "xyz") == three


def test_ways_of_a_place_and_of_all_tables() -> None:
    assert [ways(each, MESH) for each in (ALL, FIRST, REST, (), "y")] == [8, 2, 4, 1, 4]
    layout = Layout((Rule("*", {"F": "x"}),), {"ffn": {"T": "y", "F": ("x",)}}, kv={"K": ALL})
    counts = {letters: most_ways(letters, layout, MESH) for letters in ("T", "F", "NK", "D")}
    assert counts == {"T": 4, "F": 2, "NK": 8, "D": 1}
    assert most_ways("NK", layout, {"x": 3, "y": 2}) == 6


@pytest.mark.parametrize(
    ("layout", "query", "norm", "embedding", "pages"),
    [
        ("megatron", (None, ("x", "y")), (), (), ("x", "y")),
        ("sequence_parallel", (None, ("x", "y")), (), (), ("x", "y")),
        ("weight_stationary_2d", ("x", "y"), (), (), ("y", "x")),
        ("weight_gathered", ("x", "y"), (), (), ("y", "x")),
        ("attention_dp", (), (), (), None),
        ("context_parallel", (), (), (), None),
        ("expert_parallel", (None, ("x", "y")), (), (), ("x", "y")),
        ("expert_all_to_all", (None, ("x", "y")), (), (), ("x", "y")),
        ("fsdp", (("x", "y"),), (), (), ("x", "y")),
    ],
)
def test_where_each_puts_parameters_and_pages(
    layout: str, query: tuple, norm: tuple, embedding: tuple, pages: object
) -> None:
    mesh, table = mesh_of(MESH), LAYOUTS[layout]
    for path, shape, axes in (
        ("layers.0.attn.q_DNH", (16, 8, 8), query),
        ("layers.0.attn_norm.scale_D", (16,), norm),
        ("embed_VD", (20, 16), embedding),
    ):
        whole = PartitionSpec(*axes, *[None] * (len(shape) - len(axes)))
        assert shard(path, shape, mesh, table).spec == whole, path
    assert pages_sharding(mesh, table).spec == PartitionSpec(None, pages)


@pytest.mark.parametrize(
    ("layout", "groups", "columns"),
    [
        ("megatron", 8, 32),
        ("weight_stationary_2d", 8, 32),
        ("weight_gathered", 8, 32),
        ("attention_dp", 3, 32),
        ("context_parallel", 3, 30),
        ("fsdp", 8, 30),
    ],
)
def test_padding_to_what_is_cut(layout: str, groups: int, columns: int) -> None:
    wide = padded(MODEL, MESH, LAYOUTS[layout])
    assert (wide.num_key_value_heads, wide.num_attention_heads) == (groups, 2 * groups)
    assert wide.intermediate_size == columns


def test_activations_and_weights_inside_a_program() -> None:
    """A device's piece is that of the table; values stay."""
    mesh = mesh_of(MESH)
    layout = LAYOUTS["weight_gathered"]
    x = np.arange(8 * 16, dtype=np.float32).reshape(8, 16)

    def program(x: jax.Array) -> list[jax.Array]:
        return [
            place(layout, "residual", x),
            place(layout, "ffn", x),
            for_use("layers.0.mlp.up_DF", x, layout),
            for_use("layers.0.mlp.up_DF", x, LAYOUTS["fsdp"]),
        ]

    with jax.set_mesh(mesh):
        found = jax.jit(program)(x)
    for array, shape in zip(found, [(4, 16), (4, 4), (8, 4), (8, 16)], strict=True):
        np.testing.assert_array_equal(array, x)
        assert array.sharding.shard_shape(array.shape) == shape
    # What no table names, or on one device, is left alone.
    assert place(LAYOUTS["megatron"], "residual", x) is x
    assert place(layout, "residual", x) is x
