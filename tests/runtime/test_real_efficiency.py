"""Facts known of a real run's GPUs."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from jaxinfer.hardware.catalogue import find_gpu, find_model, gpu_of_device
from jaxinfer.hardware.efficiency import Efficiency, model_flops
from jaxinfer.models.config import ModelConfig
from jaxinfer.runtime.efficiency import real_efficiency

LLAMA_3_8B = ModelConfig(
    architecture="LlamaForCausalLM", vocab_size=128256, hidden_size=4096, intermediate_size=14336,
    num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
    max_position_embeddings=8192, norm_eps=1e-5, tie_word_embeddings=False, bos_token_id=None,
    eos_token_ids=(), windows=(None,) * 32,
)  # fmt: skip
H200, L4, CPU = "NVIDIA H200", "NVIDIA L4", "cpu"


def plan(*kinds: str, config: ModelConfig = LLAMA_3_8B, dtype: Any = jnp.bfloat16) -> Any:
    devices = [
        SimpleNamespace(device_kind=kind, platform="gpu", id=number)
        for number, kind in enumerate(kinds)
    ]
    facts = {"devices": devices, "config": config, "dtype": jnp.dtype(dtype), "num_kv_heads": 8}
    return SimpleNamespace(**facts, ffn=None)


def test_flops_and_power_of_all_gpus() -> None:
    found = real_efficiency([plan(H200, H200, L4), plan(H200)])
    assert found == Efficiency(
        model=model_flops(find_model("llama-3-8b")),
        peak_flops=pytest.approx((2 * 989 + 121) * 1e12),
        watts=2 * 700 + 72,
    )


@pytest.mark.parametrize("kinds", [[CPU], [H200, CPU], ["NVIDIA H200 NVL"]])
def test_what_is_not_known_has_no_figures(kinds: list[str]) -> None:
    assert real_efficiency([plan(*kinds)]) == Efficiency()


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": jnp.float32},
        {"config": replace(LLAMA_3_8B, windows=(None, 512) * 16)},
        {"config": replace(LLAMA_3_8B, num_key_value_heads=16)},
    ],
)
def test_flops_that_are_not_counted_right_are_not_counted(other: Any) -> None:
    found = real_efficiency([plan(L4), plan(L4, **other)])
    assert (found.model, found.watts) == (None, 72)


def test_a_device_is_the_gpu_of_its_name() -> None:
    assert gpu_of_device("NVIDIA A100-SXM4-80GB") == find_gpu("A100-80G-SXM")
    assert gpu_of_device("NVIDIA A10") == find_gpu("A10")
    assert gpu_of_device("NVIDIA A") is None


def test_opt_has_two_matrices_where_others_have_three() -> None:
    opt = replace(LLAMA_3_8B, architecture="OPTForCausalLM")
    flops = [real_efficiency([plan(L4, config=c)]).model for c in (LLAMA_3_8B, opt)]
    assert flops[0]
    assert flops[1]
    assert flops[0].token - flops[1].token == 2 * 32 * 4096 * 14336
