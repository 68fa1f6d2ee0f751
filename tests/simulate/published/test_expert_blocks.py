"""Experts in blocks of 128 rows, beside others' measurements of DeepGEMM's on and off."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxinfer.errors import JaxinferError
from jaxinfer.hardware.catalogue import ModelShape
from jaxinfer.simulate.published.columns import MeasuredPoints
from jaxinfer.simulate.published.convert import convert
from jaxinfer.simulate.published.expert_blocks import block_times, most_rows
from jaxinfer.simulate.published.files import Card
from jaxinfer.simulate.published.products import ProductTimes
from tests.support.published_cases import MODEL, gemm_ms, make_card, wanted, write

EXPERTS = MODEL.model_dump() | {"num_experts": 16, "num_experts_per_tok": 2}
M = (*(2**power for power in range(17)),)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Blocks' products take half of bfloat16's, and a scaling of the input."""
    root = make_card(tmp_path_factory.mktemp("blocks") / "t")
    rows = [
        {"gemm_dtype": dtype, "m": m, "n": n, "k": k, "latency": block_ms(dtype, m, n, k)}
        for dtype in ("bfloat16", "fp8_block")
        for m in M
        for n in (64, 512, 1024, 2048, 4096)
        for k in (256, 512, 1024)
    ]
    write(root / "x9_sxm" / "gemm" / "trtllm" / "1.2.0" / "gemm_perf.parquet", rows)
    return root


def block_ms(dtype: str, m: int, n: int, k: int) -> float:
    return gemm_ms("fp8" if dtype == "fp8_block" else dtype, m, n, k)


def of(root: Path, **changes: Any) -> dict[float, float]:
    asked = {"products": "fp8_block", "expert_blocks": True, "small_operators": False}
    model = ModelShape(**EXPERTS)
    return convert(wanted(root, **{"model": model, **asked, **changes})).dense["moe"]


@pytest.mark.parametrize(
    ("tokens", "experts", "rows"),
    [(1, 128, 16_384), (16, 128, 16_384), (17, 128, 16_512), (16, 64, 8_320), (8000, 128, 80_256)],
)
def test_rows_are_those_of_the_most_blocks(tokens: int, experts: int, rows: int) -> None:
    """vLLM's compute_aligned_M: tokens by 8 and 127 more for each expert, in whole blocks."""
    model = ModelShape(**(EXPERTS | {"num_experts": 128, "num_experts_per_tok": 8}))
    assert most_rows(tokens, model, experts) == rows


def test_few_tokens_take_as_long_as_one(root: Path) -> None:
    """The first product without its input's scaling, the second with it, of 2,048 rows or more."""
    found = of(root)
    assert found[1] == pytest.approx(found[8])
    scaling = 1e-4 * 2048 * 512**0.5
    narrow = block_ms("fp8_block", 2048, 64, 512) - block_ms("bfloat16", 2048, 64, 512)
    assert narrow == pytest.approx(scaling, rel=0.2)
    first = block_ms("fp8_block", 2048, 2048, 512) - narrow
    assert found[1] == pytest.approx(1e3 * (first + block_ms("fp8_block", 2048, 512, 1024)))
    # 16,384 tokens by 2 are rows of their own.
    assert found[16_384] > 12 * found[1]


def test_the_first_blocks_wait_for_weights(root: Path) -> None:
    """A card that reads little: the first block of each expert takes as long as its weights."""
    slow = make_card(root.parent / "slow")
    table = "x9_sxm/gemm/trtllm/1.2.0/gemm_perf.parquet"
    (slow / table).write_bytes((root / table).read_bytes())
    numbers = slow / "x9_sxm.yaml"
    numbers.write_text(numbers.read_text().replace("1000000000000.0", "1000000000.0"))
    read_s = ModelShape(**EXPERTS).experts_read(64) * 3 * 512 * 1024 / 0.8e9
    assert read_s < of(slow)[64] * 1e-6 < read_s + of(root)[64] * 1e-6


def test_devices_that_share_experts_whole_have_fewer_of_them(root: Path) -> None:
    """Two devices with eight whole experts each, half the blocks; or with a half of all sixteen."""
    whole, halves = of(root, devices=2, expert_parallel=2), of(root, devices=2)
    assert 0.7 < whole[1] / halves[1] < 0.9
    assert 1.4 < whole[16_384] / halves[16_384] < 1.6


def test_products_with_another_scale_are_refused(root: Path) -> None:
    with pytest.raises(JaxinferError, match=r"^expert_blocks takes weight_dtype: fp8 and fp8: "):
        of(root, products="bfloat16")


# Microseconds of H100 by aiconfigurator's tables of vLLM 0.19 (Apache-2.0), by m from 128 on; those
# of n = 768 and k = 384 are between what was measured.
H100_M = (128, 512, 1024, 2048, 4096, 8192, 16_384, 32_768)
H100 = {
    ("fp8_block", 768, 3072): (16.9, 18.7, 22.8, 28.7, 53.3, 90.8, 166.8, 325.9),
    ("fp8_block", 3072, 384): (9.3, 10.1, 13.0, 16.5, 26.3, 45.1, 80.2, 154.1),
    ("fp8_block", 64, 3072): (16.5, 18.6, 21.4, 28.0, 40.0, 71.9, 130.6, 247.9),
    ("bfloat16", 64, 3072): (6.3, 6.6, 6.7, 7.2, 7.9, 21.1, 39.2, 76.2),
}


def products(dtype: str) -> ProductTimes:
    points = [
        (m, n, k, us / 1e3)
        for (of, n, k), row in H100.items()
        if of == dtype
        for m, us in zip(H100_M, row, strict=True)
    ]
    table = np.array(points)
    return ProductTimes(MeasuredPoints(Path("gemm_perf"), table[:, :3], table[:, 3]))


def test_deep_gemm_adds_to_a_step_what_was_measured() -> None:
    """MiniMax-M2 on four H100, ten requests: 32.21 ms per token with DeepGEMM, 16.39 without.

    Measured by vllm-project/recipes, pull request 112. Without, 10 tokens take 118 us by moe_perf.
    """
    card = Card(Path(), "h100_sxm", 0.8 * 3.35e12, 3.35e12, 3e-6, 4.5e11, 9.89e14, True, ())
    model = ModelShape(
        hidden_size=3072,
        intermediate_size=1536,
        num_hidden_layers=62,
        num_attention_heads=48,
        num_key_value_heads=8,
        vocab_size=200_064,
        num_experts=256,
        num_experts_per_tok=8,
    )
    found = block_times(products("fp8_block"), products("bfloat16"), card, model, 4, 1, True)
    with_it = found[8] + (found[16] - found[8]) / 4
    assert 62 * (with_it - 118) / 1e3 == pytest.approx(32.21 - 16.39, rel=0.05)
