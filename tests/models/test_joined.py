"""Weights of queries, keys and values as one: its columns, and where a plan joins them."""

from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer.config.engine import EngineOptions
from jaxinfer.models.config import ModelConfig, Rope
from jaxinfer.models.joined import join
from jaxinfer.models.stage import Layers
from jaxinfer.runtime.stage.random_weights import random_parameters
from jaxinfer.runtime.stage.stage_plan import StagePlan, make_plan

D, N, K, H = 16, 8, 4, 8
MODEL = ModelConfig(
    "LlamaForCausalLM", 20, D, 32, 2, N, K, H, 100, 1e-5, False, None, (), (None, None),
    Rope((1.0,) * 4),
)  # fmt: skip
ATTENTION = ("layers.0.attn.", "layers.1.attn.")


def planned(devices: int = 1, config: ModelConfig = MODEL, **options: Any) -> StagePlan:
    asked = EngineOptions(**{"page_size": 16, "max_num_seqs": 4, "kernels": "interpret"} | options)
    return make_plan(config, asked, jax.devices()[:devices], Layers(0, 2, 2), 0)


@pytest.mark.parametrize("rows", [(D,), ()])
def test_a_kv_head_has_its_queries_its_key_and_its_value(rows: tuple[int, ...]) -> None:
    """Join weights, and scales, which have no rows."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(*rows, heads, H)) for heads in (N, K, K))
    found = np.asarray(join(q, k, v))
    assert found.shape == (*rows, K, N // K + 2, H)
    for head in range(K):
        for number in range(N // K):
            of_query = q[..., head * (N // K) + number, :]
            np.testing.assert_array_equal(found[..., head, number, :], of_query.astype(np.float32))
        np.testing.assert_array_equal(found[..., head, -2, :], k[..., head, :].astype(np.float32))
        np.testing.assert_array_equal(found[..., head, -1, :], v[..., head, :].astype(np.float32))


def test_kernels_of_cpus_keep_three() -> None:
    for kernels in ("plain", "auto"):
        plan = planned(kernels=kernels)
        assert plan.joined == ()
        assert plan.step_arguments[0]["layers"][0]["attn"].keys() >= {"q_DNH", "k_DKH", "v_DKH"}


def test_a_step_takes_one() -> None:
    """The step takes one array of the size of three; the plan keeps the checkpoint's names."""
    plan = planned()
    assert plan.joined == ATTENTION
    assert "layers.0.attn.q_DNH" in plan.parameters
    attn = plan.step_arguments[0]["layers"][1]["attn"]
    assert attn.keys() == {"qkv_DKXH", "o_NHD"}
    assert attn["qkv_DKXH"].get_value().shape == (D, K, N // K + 2, H)


@pytest.mark.parametrize(("devices", "layout"), [(2, "megatron"), (4, "sequence_parallel")])
def test_a_mesh_cuts_kv_heads(devices: int, layout: str) -> None:
    array = planned(devices, layout=layout).step_arguments[0]["layers"][0]["attn"]["qkv_DKXH"]
    value = array.get_value()
    assert value.sharding.shard_shape(value.shape) == (D, K // devices, N // K + 2, H)


def test_gathered_weights_are_not_joined() -> None:
    assert planned(2, layout="fsdp").joined == ()


def test_weights_of_unlike_formats_are_not_joined() -> None:
    """A layer's keys have 32 bits where the checkpoint left them out."""
    wide = ("layers.1.attn.k_DKH",)
    config = MODEL.__class__(**vars(MODEL) | {"stored_bits": "int8", "wide_weights": wide})
    plan = planned(config=config)
    assert plan.joined == ATTENTION[:1]
    attn = plan.step_arguments[0]["layers"][0]["attn"]
    assert attn["qkv_DKXH"].get_value().dtype == np.int8
    assert attn["qkv_scale_KXH"].get_value().shape == (K, N // K + 2, H)


def test_stages_on_one_device_share_what_is_joined() -> None:
    """Two stages have one array; a third one, beside other kernels, has the three as they were."""
    plans = [planned(), planned(), planned(kernels="plain")]
    one, other, plain = (jax.tree.leaves(each) for each in random_parameters(MODEL, plans))
    assert [id(leaf) for leaf in one] == [id(leaf) for leaf in other]
    attn, own = (random_parameters(MODEL, plans)[i]["layers"][0]["attn"] for i in (0, 2))
    three = (own[name].get_value() for name in ("q_DNH", "k_DKH", "v_DKH"))
    np.testing.assert_array_equal(attn["qkv_DKXH"].get_value(), join(*three))
    assert not any(leaf.is_deleted() for leaf in [*one, *other, *plain])


def test_what_is_joined_is_no_longer_there_alone() -> None:
    before = len(jax.live_arrays())
    found = random_parameters(MODEL, [planned(), planned()])
    assert len(jax.live_arrays()) - before == len(jax.tree.leaves(found[0]))
