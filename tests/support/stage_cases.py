"""Plans of two instances, and their pages full of numbers."""

from typing import Any

import jax
import numpy as np

from jaxinfer.config.cluster import ClusterConfig
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.rope import Rope
from jaxinfer.pallas_kernels.kv_pages import KVPages
from jaxinfer.runtime.stage.cluster_plan import plan_cluster
from jaxinfer.runtime.stage.stage_plan import StagePlan

H = 8  # The head dimension.


def model(layers: int, kv_heads: int) -> ModelConfig:
    return ModelConfig(
        "LlamaForCausalLM", 16, 16, 16, layers, 2 * kv_heads, kv_heads, H, 512, 1e-5, True, None,
        (), (None,) * layers, Rope((1.0,) * (H // 2)),
    )  # fmt: skip


def plans(kv_heads: int, source: dict[str, Any], dest: dict[str, Any]) -> list[list[StagePlan]]:
    """Return plans of two instances of four layers, on two devices each or ``tp`` of them."""
    ends = {"a": source, "b": dest}
    groups = {
        name: {"devices": max(2, tp), "tensor_parallel_size": tp}
        for name, tp in ((name, end.pop("tp", 2)) for name, end in ends.items())
    }
    instances = {}
    for name, end in ends.items():
        layers = end.pop("layers", None)
        place = {"stages": [{"group": name, "layers": n} for n in layers]} if layers else None
        instances[name] = (place or {"group": name}) | {"num_pages": 80} | end
    config = ClusterConfig.model_validate({"groups": groups, "instances": instances})
    return list(plan_cluster(model(4, kv_heads), config).values())


def pages_of(plan: StagePlan, rng: np.random.Generator) -> list[KVPages]:
    """Full of numbers, those of heads that are padding included."""

    def full(array: jax.ShapeDtypeStruct) -> jax.Array:
        drawn = rng.normal(size=array.shape).astype(array.dtype)
        return jax.device_put(drawn, array.sharding)

    return [jax.tree.map(full, layer) for layer in plan.pages]


def entries(kv: KVPages, plan: StagePlan, table: np.ndarray, count: int) -> np.ndarray:
    """Keys and values [2, token, KV head, head dim] of a table's first tokens."""
    size = plan.limits.page_size
    position = np.arange(count)
    page, offset = table[position // size], position % size
    heads = slice(plan.num_kv_heads)
    by_token = plan.config.kernels == "interpret"
    keys = np.asarray(kv.keys)[page, heads, *((offset,) if by_token else (slice(None), offset))]
    values = np.asarray(kv.values)[page, heads, offset]
    return np.stack([keys, values]).astype(np.float32)
