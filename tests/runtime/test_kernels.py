"""The engine with Pallas kernels, interpreted; and which devices get them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from jaxinfer import LLM, JaxinferError, SamplingParams
from jaxinfer.pallas_kernels.choice import choose_kernels

TINY_OPTIONS: dict[str, Any] = {
    "max_num_seqs": 4, "max_num_batched_tokens": 32, "page_size": 8, "num_pages": 65,
}  # fmt: skip


def tokens(llm: LLM, prompts: list[list[int]], count: int) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    found = llm.generate([{"prompt_token_ids": p} for p in prompts], params, progress=False)
    return [output.outputs[0].token_ids for output in found]


def test_greedy_tokens_of_the_demo_model(golden: list[dict[str, Any]]) -> None:
    """Those of Hugging Face transformers, with chunks of prompts beside decodes."""
    cases = sorted(golden, key=lambda case: len(case["prompt_ids"]))[:3]
    llm = LLM(
        "smollm2-135m-instruct", progress=False, kernels="interpret", dtype="float32",
        max_num_seqs=3, max_num_batched_tokens=16, token_buckets=[16], page_size=16, num_pages=60,
        max_model_len=256,
    )  # fmt: skip
    found = tokens(llm, [case["prompt_ids"] for case in cases], 8)
    assert found == [case["output_ids"][:8] for case in cases]
    (engine,) = llm.describe()["instances"].values()  # type: ignore[attr-defined]
    assert [stage["kernels"] for stage in engine["stages"]] == ["interpret"]


def test_on_two_devices(tiny_folder: Path) -> None:
    """Each with its own heads."""
    prompts = [list(range(1, 40)), [5, 6, 7], list(range(100, 117))]
    found = [
        tokens(
            LLM(
                str(tiny_folder), progress=False, kernels=kernels, tensor_parallel_size=devices,
                **TINY_OPTIONS,
            ),
            prompts, 12,
        )
        for kernels, devices in (("plain", 1), ("interpret", 2))
    ]  # fmt: skip
    assert found[0] == found[1]


def gpu(capability: str) -> Any:
    return SimpleNamespace(platform="gpu", compute_capability=capability, device_kind="NVIDIA X")


CPU: Any = SimpleNamespace(platform="cpu", device_kind="cpu")


@pytest.mark.parametrize(
    ("wanted", "device", "dtype", "head_dim", "chosen"),
    [
        ("auto", CPU, "float32", 64, "plain"),
        ("auto", CPU, "bfloat16", 64, "plain"),
        ("auto", gpu("9.0"), "bfloat16", 128, "pallas"),
        ("auto", gpu("8.6"), "bfloat16", 80, "pallas"),
        ("auto", gpu("9.0"), "float32", 128, "plain"),
        ("auto", gpu("7.5"), "bfloat16", 128, "plain"),
        ("auto", gpu("9.0"), "bfloat16", 72, "plain"),
        ("pallas", gpu("9.0"), "float32", 128, "pallas"),
        ("plain", gpu("9.0"), "bfloat16", 128, "plain"),
        ("interpret", CPU, "float32", 64, "interpret"),
    ],
)
def test_choice(wanted: str, device: Any, dtype: str, head_dim: int, chosen: str) -> None:
    assert choose_kernels(wanted, device, jnp.dtype(dtype), head_dim) == chosen


@pytest.mark.parametrize(
    ("device", "head_dim", "message"),
    [
        (CPU, 64, "kernels is pallas, the device is a cpu"),
        (gpu("7.5"), 64, "NVIDIA X has compute capability 7.5, below 8.0"),
        (gpu("9.0"), 72, "head_dim is 72, no multiple of 16"),
    ],
)
def test_a_device_that_cannot(device: Any, head_dim: int, message: str) -> None:
    with pytest.raises(JaxinferError, match=message):
        choose_kernels("pallas", device, jnp.dtype("bfloat16"), head_dim)


def test_refused_before_anything_is_loaded(tiny_folder: Path) -> None:
    with pytest.raises(JaxinferError, match="kernels is pallas, the device is a cpu"):
        LLM(str(tiny_folder), progress=False, kernels="pallas", **TINY_OPTIONS)
