"""Decisions of a plan before anything is loaded: sizes, dtypes, buckets, memory."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from properties import examples

from jaxinfer import JaxinferError
from jaxinfer.config.cluster import ClusterConfig, one_engine
from jaxinfer.config.engine import EngineOptions
from jaxinfer.config.groups import GroupConfig
from jaxinfer.models.config import ModelConfig, Rope
from jaxinfer.models.stage import Layers
from jaxinfer.runtime.stage import cluster_plan, kv_cache
from jaxinfer.runtime.stage import stage_plan as plans
from jaxinfer.runtime.stage.devices import open_groups
from jaxinfer.runtime.stage.kv_cache import abstract_pages, allocate, available_memory, memory_of
from jaxinfer.runtime.stage.stage_plan import StagePlan, choose_dtype, make_plan
from jaxinfer.runtime.stage.taken import TakenMemory

# Vocabulary 20, D 16, F 32, two layers, 4 query and 2 KV heads of 8.
MODEL = ModelConfig(
    "LlamaForCausalLM", 20, 16, 32, 2, 4, 2, 8, 100, 1e-5, False, None, (), (None, None),
    Rope((1.0,) * 4),
)  # fmt: skip
# Embedding and head; of each layer q and o, k and v, the three of the feed-forward.
MATRICES = 2 * 20 * 16 + 2 * (2 * 16 * 32 + 2 * 16 * 16 + 3 * 16 * 32)
NORMS = 5 * 16
WEIGHTS = 4 * (MATRICES + NORMS)
# Keys and values of both layers and heads, 8 numbers each, 16 tokens.
PAGE = 4 * 2 * 2 * 2 * 8 * 16


def planned(
    taken: int = 0, devices: int = 1, config: ModelConfig = MODEL, **options: Any
) -> StagePlan:
    asked = EngineOptions(**{"page_size": 16, "max_num_seqs": 4} | options)
    layers = Layers(0, config.num_hidden_layers, config.num_hidden_layers)
    return make_plan(config, asked, jax.devices()[:devices], layers, taken)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the bytes that the host has left."""
    return lambda count: monkeypatch.setattr(plans, "available_memory", lambda: count)


def test_the_pool_holds_what_can_be_of_use() -> None:
    """100 tokens are 7 pages of 16; 4 sequences of them, and the one for padding."""
    plan = planned()
    assert plan.limits.max_pages == 7
    assert plan.num_pages == 4 * 7 + 1
    assert plan.weight_bytes == WEIGHTS
    assert plan.kv_bytes == plan.num_pages * PAGE
    assert planned(max_model_len=96).limits.max_pages == 6


def test_the_pool_takes_a_share_of_what_is_free(free: Any) -> None:
    free(1000 + 100 * PAGE)
    plan = planned(taken=1000, max_num_seqs=50)
    assert plan.memory_bytes == 100 * PAGE
    assert plan.num_pages == 20
    assert planned(taken=1000, max_num_seqs=50, memory_fraction=0.5).num_pages == 50
    # Beside the weights, however large the share.
    full = planned(taken=1000, max_num_seqs=50, memory_fraction=1.0)
    assert full.num_pages == 100 - -(-WEIGHTS // PAGE)


def test_the_least_pool_and_the_largest(free: Any) -> None:
    """A page for padding and one of use."""
    free(WEIGHTS + 2 * PAGE)
    assert planned(memory_fraction=1.0).num_pages == 2
    assert planned(num_pages=2).num_pages == 2
    with pytest.raises(JaxinferError, match="num_pages 3 of 16 tokens takes"):
        planned(num_pages=3)
    free(WEIGHTS + 2 * PAGE - 1)
    for options in ({"num_pages": 2}, {"memory_fraction": 1.0}):
        with pytest.raises(JaxinferError, match="GiB are free"):
            planned(**options)  # type: ignore[arg-type]


def test_pages_of_8_bits_that_kernels_address(free: Any) -> None:
    """2^31 bytes of each array on each device: heads, tokens of a page, head dim."""
    free(2**50)
    most = 2**31 // (2 * 16 * 8)
    options = {"kernels": "interpret", "kv_cache_dtype": "int8"}
    assert planned(num_pages=most, **options).num_pages == most
    assert planned(2**20, devices=2, num_pages=2 * most, **options).num_pages == 2 * most
    with pytest.raises(JaxinferError, match=f"address {most} pages of 16 tokens in 8 bits"):
        planned(num_pages=most + 1, **options)
    assert planned(num_pages=most + 1, kernels="interpret").num_pages == most + 1
    plain = planned(num_pages=most + 1, kernels="plain", kv_cache_dtype="int8")
    assert plain.num_pages == most + 1


def test_a_gpus_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A share of all of it, less what is in use and the weights, as far as others leave it."""
    stats = {"bytes_limit": 1000, "bytes_in_use": 100}
    gpu: Any = SimpleNamespace(platform="gpu", memory_stats=lambda: stats)
    assert plans._memory(gpu, 0.75, 50, taken=0) == (900, 750 - 100 - 50)
    assert plans._memory(gpu, 0.45, 50, taken=350) == (550, 450 - 100 - 50)
    assert plans._memory(gpu, 0.75, 50, taken=350) == (550, 550 - 50)
    fractions: list[float] = []
    monkeypatch.setattr(
        plans,
        "_memory",
        lambda device, fraction, *args: fractions.append(fraction) or (2**40, 2**40),
    )
    planned()
    planned(memory_fraction=0.3)
    device: Any = SimpleNamespace(platform="gpu", id=0, process_index=0)
    monkeypatch.setattr(plans, "choose_kernels", lambda *args: "plain")
    monkeypatch.setattr(plans, "Mesh", lambda *args: Mesh(np.array(jax.devices()[:1]), ("tp",)))
    layers = Layers(0, 2, 2)
    make_plan(MODEL, EngineOptions(page_size=16), [device], layers, 0)
    assert fractions == [0.2, 0.3, 0.9]


def test_a_device_that_does_not_say_what_memory_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "free_memory", lambda device, taken: None)
    with pytest.raises(JaxinferError, match="cpu does not say how much memory it has: set num_pa"):
        planned()
    plan = planned(num_pages=5)
    assert plan.num_pages == 5
    assert plan.memory_bytes is None
    gpu: Any = SimpleNamespace(platform="gpu", memory_stats=lambda: None)
    monkeypatch.undo()
    assert plans.free_memory(gpu, 0) is None


def test_a_gpus_sizes_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defaults where none are given; on a CPU they are as they were."""
    sizes = []

    def plan_stages(model: ModelConfig, config: Any, instance: Any, *rest: Any) -> list[Any]:
        sizes.append((instance.max_num_seqs, instance.max_num_batched_tokens))
        return []

    class Stand:
        """A device, which may be counted."""

        platform = "gpu"

    device: Any = Stand()
    monkeypatch.setattr(cluster_plan, "_plan_stages", plan_stages)
    monkeypatch.setattr(cluster_plan, "open_groups", lambda groups, share: {"engine": [device]})
    for platform in ("gpu", "cpu"):
        device.platform = platform
        for options in ({}, {"max_num_seqs": 32}, {"max_num_batched_tokens": 128}):
            cluster_plan.plan_cluster(MODEL, one_engine(EngineOptions(**options)))
    assert sizes == [(256, 8192), (32, 8192), (128, 128), (64, 512), (32, 512), (64, 128)]


@examples(50)
@given(st.data())
def test_a_gpus_sizes_are_such_as_may_be_given(data: st.DataObject) -> None:
    draw, asked = data.draw, dict[str, Any]()
    if draw(st.booleans()):
        asked["max_num_batched_tokens"] = draw(st.integers(65, 20_000))
    most = asked.get("max_num_batched_tokens", 512)
    if draw(st.booleans()):
        asked["token_buckets"] = (draw(st.integers(64, most - 1)), most)
    if draw(st.booleans()):
        asked["max_num_seqs"] = draw(st.integers(1, 64))
    options = EngineOptions(**asked).on_gpu()
    again = EngineOptions.model_validate(options.model_dump())
    assert (again.max_num_seqs, again.token_buckets) == (
        options.max_num_seqs,
        options.token_buckets,
    )
    for name, value in asked.items():
        assert getattr(options, name) == value


def test_dtypes() -> None:
    """Vectors stay float32; the KV cache has the weights' dtype unless it has its own."""
    for options, weights, kv in (
        ({}, "float32", "float32"),
        ({"dtype": "bfloat16"}, "bfloat16", "bfloat16"),
        ({"dtype": "bfloat16", "kv_cache_dtype": "int8"}, "bfloat16", "int8"),
        ({"kv_cache_dtype": "fp8"}, "float32", "float8_e4m3fn"),
    ):
        plan = planned(**options)  # type: ignore[arg-type]
        assert (plan.dtype.name, plan.kv_dtype.name) == (weights, kv)
        for path, array in plan.parameters.items():
            vector = path.endswith("_D")
            assert array.dtype == (jnp.float32 if vector else weights), path
        itemsize = plan.dtype.itemsize
        assert plan.weight_bytes == itemsize * MATRICES + 4 * NORMS
    gpu: Any = SimpleNamespace(platform="gpu")
    assert choose_dtype(EngineOptions(), gpu) == "bfloat16"
    assert choose_dtype(EngineOptions(dtype="float32"), gpu) == "float32"


def test_the_longest_sequence() -> None:
    assert planned().max_model_len == 100
    assert planned(max_model_len=100).max_model_len == 100
    assert planned(max_model_len=7).max_model_len == 7
    with pytest.raises(JaxinferError, match="max_model_len is 101, the model was made for 100"):
        planned(max_model_len=101)


def test_heads_padded_to_the_devices() -> None:
    """Three devices: 3 KV heads of 2 queries each, but 2 of them real."""
    plan = planned(devices=3)
    assert plan.num_kv_heads == 2
    assert plan.config.num_key_value_heads == 3
    assert plan.config.num_attention_heads == 6
    assert plan.config.intermediate_size == 33
    assert plan.parameters["layers.0.attn.q_DNH"].shape == (16, 6, 8)
    # On the host, each device's copy of what is whole counts.
    whole = 4 * (2 * 20 * 16 + NORMS) * 3
    cut = 4 * 2 * (2 * 16 * 48 + 2 * 16 * 24 + 3 * 16 * 33)
    assert plan.weight_bytes == whole + cut
    assert plan.kv_bytes == plan.num_pages * PAGE // 2 * 3


def test_memory_of_arrays() -> None:
    """Memory is counted per device on GPUs, and for all devices together on the host."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("tp",))
    cut = jax.ShapeDtypeStruct((8, 3), "float32", sharding=NamedSharding(mesh, PartitionSpec("tp")))
    whole = jax.ShapeDtypeStruct((5,), "bfloat16", sharding=NamedSharding(mesh, PartitionSpec()))
    assert memory_of([cut, whole]) == 4 * 24 + 4 * 10
    sharding: Any = SimpleNamespace(
        device_set=[SimpleNamespace(platform="gpu")] * 4, shard_shape=lambda shape: (2, 3)
    )
    on_gpus: Any = SimpleNamespace(sharding=sharding, shape=(8, 3), dtype=jnp.dtype("float32"))
    assert memory_of([on_gpus]) == 24


def test_the_hosts_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(available=7, total=9, free=5)
    monkeypatch.setattr(kv_cache.psutil, "virtual_memory", lambda: memory)
    assert available_memory() == 7


@pytest.mark.parametrize(
    ("kernels", "dtype", "keys"),
    [("plain", "float32", (5, 2, 8, 3)), ("interpret", "int8", (5, 2, 3, 8))],
)
def test_pages(kernels: str, dtype: str, keys: tuple[int, ...]) -> None:
    """Pages have the stage's layers, keys by token for kernels, scales for 8 bits, and zeros."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("tp",))
    config = replace(MODEL, kernels=kernels)
    abstract = abstract_pages(config, Layers(1, 4, 6), 5, 3, jnp.dtype(dtype), mesh)
    assert len(abstract) == 3
    for pages in allocate(abstract):
        assert pages.keys.shape == keys
        assert pages.values.shape == (5, 2, 3, 8)
        assert pages.keys.dtype == pages.values.dtype == dtype
        assert pages.keys.sharding.shard_shape(keys)[1] == 1
        scales = pages.key_scale_PK, pages.value_scale_PK
        if dtype == "int8":
            assert all(scale.shape == (5, 2) and scale.dtype == "float32" for scale in scales)
        else:
            assert scales == (None, None)
        for array in jax.tree.leaves(pages):
            assert not np.asarray(array, np.float32).any()


def test_no_groups_open_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "devices", lambda *args: pytest.fail("JAX was asked for devices"))
    assert open_groups({}) == {}


def test_a_kind_that_no_device_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of cards are those of the devices, letter by letter."""
    device = type("Card", (), {"device_kind": "NVIDIA H100 80GB HBM3"})()
    monkeypatch.setattr(jax, "devices", lambda *args: [device])
    asked = r"^groups\.g\.kind is 'h100', must be part of a device's name: NVIDIA H100 80GB HBM3$"
    with pytest.raises(JaxinferError, match=asked):
        open_groups({"g": GroupConfig(kind="h100")})
    assert open_groups({"g": GroupConfig(kind="H100")}) == {"g": [device]}


def on_one_device(**options: Any) -> list[StagePlan]:
    """Plans of two instances whose groups share a device."""
    own = {"page_size": 16, "max_num_seqs": 4} | options
    made = ClusterConfig.model_validate(
        {
            "groups": {"g": {}, "h": {"shares": "g"}},
            "instances": {"x": {"group": "g", **own}, "y": {"group": "h", **own}},
        }
    )
    return [plan for stages in cluster_plan.plan_cluster(MODEL, made).values() for plan in stages]


def test_weights_on_one_device_are_there_once(free: Any) -> None:
    """Each of two plans has pages of its own; to the byte."""
    free(WEIGHTS + 2 * 5 * PAGE)
    first, second = on_one_device(num_pages=5)
    assert first.devices == second.devices
    assert (first.memory_bytes, second.memory_bytes) == (WEIGHTS + 10 * PAGE, 5 * PAGE)
    assert first.weight_bytes == second.weight_bytes == WEIGHTS
    free(WEIGHTS + 2 * 5 * PAGE - 1)
    with pytest.raises(
        JaxinferError, match=r"^instances\.y: num_pages 5 .* beside 0\.000 GiB of w"
    ):
        on_one_device(num_pages=5)


def test_a_plan_of_another_dtype_has_weights_of_its_own(free: Any) -> None:
    """Matrices in bfloat16 beside those in float32; norms, in float32 both times, as well."""
    free(10**9)
    taken = TakenMemory()
    wide, narrow = (planned(dtype=dtype, num_pages=3) for dtype in ("float32", "bfloat16"))
    for plan, size in ((wide, WEIGHTS), (wide, 0), (narrow, 2 * MATRICES + 4 * NORMS)):
        before = taken.of(plan.devices[0])
        taken.add(plan.devices, plan.parameters, plan.dtype, 7)
        assert taken.of(plan.devices[0]) - before == size + 7


def test_a_gpu_is_divided_among_its_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evenly, where none says what it takes."""

    class Stand:
        """A GPU that may be counted."""

        platform = "gpu"

    gpu: Any = Stand()
    shares = []

    def plan_stages(model: ModelConfig, config: Any, instance: Any, *rest: Any) -> list[Any]:
        shares.append(instance.memory_fraction)
        return []

    monkeypatch.setattr(cluster_plan, "_plan_stages", plan_stages)
    groups = {"g": [gpu], "h": [gpu]}
    monkeypatch.setattr(cluster_plan, "open_groups", lambda *asked: groups)
    on_one_device()
    on_one_device(memory_fraction=0.3)
    assert shares == [0.45, 0.45, 0.3, 0.3]
