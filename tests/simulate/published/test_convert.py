"""Operators out of published tables: exact where measured, powers between, stated corrections."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from properties import examples
from published_cases import (
    MODEL,
    M,
    all_reduce_ms,
    chunks_ms,
    decodes_ms,
    gemm_ms,
    make_card,
    wanted,
    write,
)

from jaxinfer import JaxinferError
from jaxinfer.hardware.catalogue import ModelShape
from jaxinfer.simulate.published.columns import read_measured
from jaxinfer.simulate.published.convert import convert
from jaxinfer.simulate.published.products import ProductTimes


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_card(tmp_path_factory.mktemp("published"))


def test_products_are_those_of_each_devices_share(root: Path) -> None:
    """hq and hk per device, gate and up together, the head over all of the vocabulary."""
    for devices in (1, 2):
        found = convert(wanted(root, devices=devices))
        for name, n, k in (
            ("qkv_proj", (4 + 2 * 2) * 128 // devices, 512),
            ("o_proj", 512, 4 * 128 // devices),
            ("gate_up_proj", 2 * 1024 // devices, 512),
            ("down_proj", 512, 1024 // devices),
        ):
            assert found.dense[name] == pytest.approx(
                {m: 1e3 * gemm_ms("bfloat16", m, n, k) for m in M}
            )
        head = {m: 1e3 * gemm_ms("bfloat16", m, 4096 // devices, 512) for m in M}
        assert found.heads["lm_head"] == pytest.approx(head)


def test_attention_is_by_tokens_and_entries_seen(root: Path) -> None:
    found = convert(wanted(root))
    assert found.chunks[2 * 256, 128.0] == pytest.approx(1e3 * chunks_ms(2, 256))
    assert found.decodes[16, 256] == pytest.approx(1e3 * decodes_ms(16, 256))


@examples(60)
@given(n=st.integers(32, 4096), k=st.integers(64, 2048))
def test_between_sizes_times_go_by_powers(n: int, k: int) -> None:
    """The made-up times are powers of n and of k, so that any size between is known."""
    curve = MADE.curve(n, k)
    assert curve == pytest.approx({m: gemm_ms("bfloat16", m, n, k) for m in M}, rel=1e-9)


def test_beyond_the_largest_size_times_are_in_proportion() -> None:
    assert MADE.curve(3 * 4096, 512)[64] == pytest.approx(3 * gemm_ms("bfloat16", 64, 4096, 512))
    assert MADE.curve(8, 512)[64] == pytest.approx(gemm_ms("bfloat16", 64, 32, 512))


def test_a_size_measured_at_few_tokens_does_not_count(tmp_path: Path) -> None:
    rows = [
        {"gemm_dtype": "fp8", "m": m, "n": n, "k": 64, "latency": 1e-3 * n * m}
        for n in (64, 256)
        for m in M
    ]
    rows += [{"gemm_dtype": "fp8", "m": 1, "n": 128, "k": 64, "latency": 999.0}]
    write(tmp_path / "gemm_perf.parquet", rows)
    read = read_measured(tmp_path / "gemm_perf.parquet", ("m", "n", "k"), {}, {})
    assert ProductTimes(read).curve(128, 64)[1] == pytest.approx(0.128)
    with pytest.raises(JaxinferError, match=r"no products near n = 100, k = 10 at 8 sizes of m"):
        ProductTimes(
            read_measured(tmp_path / "gemm_perf.parquet", ("m", "n", "k"), {"n": 128}, {})
        ).curve(100, 10)


def test_static_scales_take_off_the_quantization_alone(root: Path) -> None:
    """The made-up fp8 time is half of bfloat16's and a scaling by m and k; a floor holds below."""
    plain = convert(wanted(root, products="fp8")).dense["down_proj"]
    found = convert(wanted(root, products="fp8", static_scales=True)).dense["down_proj"]
    for m in M:
        narrow = gemm_ms("fp8", m, 64, 1024) - gemm_ms("bfloat16", m, 64, 1024)
        least = min(gemm_ms("bfloat16", m, 64, 1024), gemm_ms("fp8", m, 512, 1024))
        expected = max(gemm_ms("fp8", m, 512, 1024) - max(narrow, 0), least)
        assert found[m] == pytest.approx(1e3 * expected)
    assert any(found[m] < 0.9 * plain[m] for m in M)
    # In bfloat16 there is nothing to take off.
    both = (convert(wanted(root, static_scales=on)).dense for on in (False, True))
    assert next(both)["o_proj"] == next(both)["o_proj"]


def test_small_operators_are_bytes_at_the_cards_bandwidth_and_a_launch(root: Path) -> None:
    dense = convert(wanted(root)).dense
    for tokens in (1, 2):
        # Reads and writes of the hidden state and the residual, 2 bytes each, at 0.8 TB/s.
        expected = 3 + tokens * 4 * 512 * 2 / 0.8e6
        assert dense["layernorm"][tokens] == pytest.approx(expected)
        assert dense["act_fn"][tokens] == pytest.approx(3 + tokens * 3 * 1024 * 2 / 0.8e6)
    assert set(dense["rotary_emb"].values()) == {0.0}  # Within trtllm's attention.
    off = convert(wanted(root, small_operators=False))
    assert not any(off.dense["layernorm"].values())
    assert not any(off.heads["sampler"].values())
    normed = MODEL.model_copy(update={"qk_norm": True})
    assert convert(wanted(root, model=normed)).dense["qk_norm"][1] == pytest.approx(
        3 + 2 * (4 + 2) * 128 * 2 / 0.8e6
    )


def test_all_reduces_are_of_elements(root: Path) -> None:
    """Two tokens of 512 elements are a message of 1,024."""
    found = convert(wanted(root, devices=2)).dense
    assert found["all_reduce"][2] == pytest.approx(1e3 * all_reduce_ms(1024))
    alone = 3 + 2 * 2 * 512 * 2 / 0.8e6
    assert found["embedding"][2] == pytest.approx(alone + 1e3 * all_reduce_ms(1024))
    assert "all_reduce" not in convert(wanted(root)).dense


def test_vllm_replays_graphs_up_to_512_tokens(tmp_path: Path) -> None:
    root = make_card(tmp_path / "t", backend="vllm", version="0.19.0")
    found = convert(wanted(root, backend="vllm", version="0.19.0", devices=2)).dense["all_reduce"]
    assert found[512] == pytest.approx(1e3 * all_reduce_ms(2**18, "vllm_graph"))
    assert found[1024] == pytest.approx(1e3 * all_reduce_ms(2**19, "vllm_eager"))


@pytest.mark.parametrize(("link", "counts"), [(4.5e11, True), (9e11, False)])
def test_the_quickest_all_reduce_of_cards_with_one_link_counts(
    tmp_path: Path, link: float, counts: bool
) -> None:
    root = make_card(tmp_path / "t", reduce_ms=lambda n, kind: 3 * all_reduce_ms(n))
    make_card(root, "y9_sxm", link=link)
    slow = 1e3 * 3 * all_reduce_ms(1024)
    found = convert(wanted(root, devices=2)).dense["all_reduce"][2]
    assert found == pytest.approx(slow / 3 if counts else slow)
    alone = convert(wanted(root, devices=2, quickest_all_reduce=False)).dense["all_reduce"][2]
    assert alone == pytest.approx(slow)


def test_experts_are_one_operator_by_tokens(root: Path) -> None:
    shape = MODEL.model_dump() | {"num_experts": 16, "num_experts_per_tok": 2}
    model = ModelShape(**shape)
    row = {
        "moe_dtype": "bfloat16",
        "hidden_size": 512,
        "inter_size": 1024,
        "topk": 2,
        "num_experts": 16,
        "moe_tp_size": 1,
        "moe_ep_size": 2,
    }
    path = root / "x9_sxm" / "moe" / "trtllm" / "1.2.0" / "moe_perf.parquet"
    times = {"balanced": 0.1, "power_law_1.2": 0.2}
    write(
        path,
        [
            row | {"num_tokens": t, "distribution": d, "latency": 1 + each * t}
            for t in (1, 8, 64)
            for d, each in times.items()
        ],
    )
    asked = wanted(root, model=model, devices=2, expert_parallel=2)
    dense = convert(asked).dense
    assert dense["moe"] == pytest.approx({1: 1100, 8: 1800, 64: 7400})
    assert dense["router"][8] == pytest.approx(1e3 * gemm_ms("bfloat16", 8, 32, 512))
    assert not dense.keys() & {"gate_up_proj", "down_proj"}
    with pytest.raises(JaxinferError, match=r"no rows with moe_tp_size 2; there are 1$"):
        convert(wanted(root, model=model, devices=2))
    with pytest.raises(JaxinferError, match=r"^expert_parallel is 3, must divide 2 devices$"):
        convert(wanted(root, model=model, devices=2, expert_parallel=3))


@pytest.fixture(scope="module", autouse=True)
def _made(root: Path) -> None:
    global MADE
    path = root / "x9_sxm" / "gemm" / "trtllm" / "1.2.0" / "gemm_perf.parquet"
    MADE = ProductTimes(read_measured(path, ("m", "n", "k"), {"gemm_dtype": "bfloat16"}, {}))


MADE: ProductTimes


def test_attention_that_the_peak_forbids_is_another_cards(tmp_path: Path) -> None:
    """Times of the made-up card are possible for 10^15 FLOPs per second, not for a tenth."""
    quick = make_card(tmp_path / "systems")
    make_card(quick, "y9_sxm")
    slow = 8.0  # So many times as long on the other card.
    table = "attention/trtllm/1.2.0/context_attention_perf.parquet"
    rows = pq.read_table(quick / "y9_sxm" / table).to_pylist()
    write(quick / "y9_sxm" / table, [row | {"latency": slow * row["latency"]} for row in rows])
    longest = 4 * 1024, 512.0  # Four prompts of 1,024 tokens.
    flops = 4 * 4 * 1024 * 1025 / 2 * 4 * 128  # Per pair and number of each head.

    def given(peak: float) -> None:
        for card in ("x9_sxm", "y9_sxm"):
            numbers = yaml.safe_load((quick / f"{card}.yaml").read_text())
            numbers["gpu"]["bfloat16_tc_flops"] = peak
            (quick / f"{card}.yaml").write_text(yaml.safe_dump(numbers))

    own = chunks_ms(4, 1024) * 1e-3
    given(1.01 * flops / own)
    assert convert(wanted(quick)).chunks[longest] == pytest.approx(own * 1e6)
    given(0.99 * flops / own)
    assert convert(wanted(quick)).chunks[longest] == pytest.approx(slow * own * 1e6)
    as_it_is = convert(wanted(quick, possible_attention=False))
    assert as_it_is.chunks[longest] == pytest.approx(own * 1e6)
    given(0.99 * flops / own / slow)
    with pytest.raises(JaxinferError, match=r"prompts take less than the card's peak FLOPs allow"):
        convert(wanted(quick))


def test_layers_with_windows_are_in_the_mean(tmp_path: Path) -> None:
    """A quarter of the layers in a table where these take half of the time."""
    root = make_card(tmp_path / "systems")
    for name in ("context_attention_perf", "generation_attention_perf"):
        path = root / "x9_sxm" / "attention" / "trtllm" / "1.2.0" / f"{name}.parquet"
        rows = pq.read_table(path).to_pylist()
        near = [row | {"window_size": 128, "latency": row["latency"] / 2} for row in rows]
        write(path, [*rows, *near])
    model = MODEL.model_copy(
        update={"num_hidden_layers": 4, "sliding_window": 128, "windowed_layers": 1}
    )
    found, whole = convert(wanted(root, model=model)), convert(wanted(root))
    assert found.chunks == pytest.approx({at: 0.875 * us for at, us in whole.chunks.items()})
    assert found.decodes == pytest.approx({at: 0.875 * us for at, us in whole.decodes.items()})


def test_arrays_are_read_like_parquet(tmp_path: Path) -> None:
    root = make_card(tmp_path / "systems")
    by_parquet = convert(wanted(root, devices=2))
    for path in root.rglob("*.parquet"):
        table = pq.read_table(path)
        columns = {name: np.array(table[name].to_pylist()) for name in table.column_names}
        np.savez_compressed(path.with_suffix(".npz"), **columns)
        path.unlink()
    by_arrays = convert(wanted(root, devices=2))
    assert by_arrays.dense == by_parquet.dense
    assert by_arrays.decodes == by_parquet.decodes
    with pytest.raises(
        JaxinferError, match=r"gemm_perf\.npz: no rows with gemm_dtype fp4 \(by weight_dtype\)"
    ):
        convert(wanted(root, products="fp4"))
