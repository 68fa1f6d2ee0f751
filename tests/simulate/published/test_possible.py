"""Attention of decodes that bandwidths forbid is corrected; what they allow stays as it is."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from published_cases import decodes_ms, make_card, wanted, write

from jaxinfer.errors import JaxinferError
from jaxinfer.simulate.published.convert import convert

# 64 decodes of 2,048 entries; an entry has two KV heads of 128 keys and values of 2 bytes.
LONG, LONG_BYTES = (64, 2048), 64 * 2048 * 2 * 2 * 128 * 2
SHORT = 1, 16


def set_numbers(root: Path, card: str, bandwidth: float, flops: float = 1e15) -> None:
    """Give a card a peak bandwidth and peak FLOPs."""
    path = root / f"{card}.yaml"
    numbers = yaml.safe_load(path.read_text())
    numbers["gpu"] |= {"mem_bw": bandwidth, "bfloat16_tc_flops": flops}
    path.write_text(yaml.safe_dump(numbers))


def take_times(root: Path, card: str, times: float) -> None:
    """Let a card's decodes take this many times as long."""
    path = root / card / "attention" / "trtllm" / "1.2.0" / "generation_attention_perf.parquet"
    rows = pq.read_table(path).to_pylist()
    write(path, [row | {"latency": times * row["latency"]} for row in rows])


@pytest.mark.parametrize(("share", "allowed"), [(0.99, True), (1.01, False)])
def test_decodes_beyond_the_peak_read_as_fast_as_other_operators(
    tmp_path: Path, share: float, allowed: bool
) -> None:
    """Others reach 0.8 of the peak; of decodes that take longer than that, nothing changes."""
    root = make_card(tmp_path / "t")
    own = 1e3 * decodes_ms(*LONG)
    peak = LONG_BYTES / (own * 1e-6) / share
    set_numbers(root, "x9_sxm", peak)
    found = convert(wanted(root)).decodes
    least = 1e6 * LONG_BYTES / (0.8 * peak)
    assert found[LONG] == pytest.approx(own if allowed else least)
    assert found[SHORT] == pytest.approx(1e3 * decodes_ms(*SHORT))
    as_it_is = convert(wanted(root, possible_attention=False)).decodes
    assert as_it_is[LONG] == pytest.approx(own)


def test_entries_of_8_bits_are_half_as_many_bytes(tmp_path: Path) -> None:
    root = make_card(tmp_path / "t")
    own = 1e3 * decodes_ms(*LONG)
    set_numbers(root, "x9_sxm", 0.7 * LONG_BYTES / (own * 1e-6))
    assert convert(wanted(root, kv="fp8")).decodes[LONG] == pytest.approx(own)
    assert convert(wanted(root)).decodes[LONG] > 1.5 * own


@pytest.mark.parametrize(
    ("bandwidth", "flops", "counts"),
    [(2e12, 1e15, True), (0.9e12, 1e15, True), (4e12, 1e15, False), (0.9e12, 2e15, False)],
)
def test_a_card_is_not_slower_than_one_with_no_more_bandwidth(
    tmp_path: Path, bandwidth: float, flops: float, counts: bool
) -> None:
    """The card has 2 TB/s and takes three times as long as the other one."""
    root = make_card(tmp_path / "t")
    make_card(root, "y9_sxm")
    take_times(root, "x9_sxm", 6)
    take_times(root, "y9_sxm", 2)
    set_numbers(root, "x9_sxm", 2e12)
    set_numbers(root, "y9_sxm", bandwidth, flops)
    points = convert(wanted(root))
    assert points.decodes[LONG] == pytest.approx((2 if counts else 6) * 1e3 * decodes_ms(*LONG))
    assert any("y9_sxm" in path for path in points.files) == counts
    other = convert(wanted(root, card="y9_sxm", kind="Y9-SXM")).decodes[LONG]
    assert other == pytest.approx(2 * 1e3 * decodes_ms(*LONG))


def test_a_table_beyond_its_own_peak_is_no_measure_for_other_cards(tmp_path: Path) -> None:
    root = make_card(tmp_path / "t")
    make_card(root, "y9_sxm")
    take_times(root, "x9_sxm", 3)
    set_numbers(root, "x9_sxm", 2e12)
    set_numbers(root, "y9_sxm", 0.5 * LONG_BYTES / (decodes_ms(*LONG) * 1e-3))
    found = convert(wanted(root)).decodes[LONG]
    assert found == pytest.approx(3 * 1e3 * decodes_ms(*LONG))


def test_a_card_without_these_heads_is_left_out_and_a_broken_table_is_not(tmp_path: Path) -> None:
    root = make_card(tmp_path / "t")
    make_card(root, "y9_sxm")
    for card in ("x9_sxm", "y9_sxm"):
        set_numbers(root, card, 2e12)
    path = root / "y9_sxm" / "attention" / "trtllm" / "1.2.0" / "generation_attention_perf.parquet"
    rows = pq.read_table(path).to_pylist()
    write(path, [row | {"num_heads": 3} for row in rows])
    assert convert(wanted(root)).decodes[LONG] == pytest.approx(1e3 * decodes_ms(*LONG))
    path.write_bytes(b"broken")
    with pytest.raises(JaxinferError, match="y9_sxm"):
        convert(wanted(root))
