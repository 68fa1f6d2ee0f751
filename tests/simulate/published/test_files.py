"""Finding published tables: cards, versions, units; what is refused, and what is kept."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from published_cases import make_card, wanted, write

from jaxinfer import JaxinferError
from jaxinfer.simulate.published.columns import read_measured
from jaxinfer.simulate.published.convert import convert
from jaxinfer.simulate.published.files import find_card, is_published


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_card(tmp_path / "t")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": "1.3.0"}, r"of trtllm 1\.3\.0; the nearest is 1\.2\.0, of 1\.0\.0, 1\.2\.0$"),
        ({"version": "0.1"}, r"of trtllm 0\.1; the nearest is 1\.0\.0, of"),
        ({"backend": "vlm"}, r"attention: no context_attention_perf of vlm; there are tr"),
        ({"kind": "Z1"}, r"no card whose name begins like Z1; there are x9_sxm$"),
        ({"card": "x8"}, r"no card 'x8'; there are x9_sxm$"),
        (
            {"products": "fp4"},
            r"no rows with gemm_dtype fp4 \(by weight_dtype\); there are bfloat16, fp8$",
        ),
        (
            {"kv": "int8"},
            r"no rows with kv_cache_dtype int8 \(by kv_cache_dtype\); there are bfloat16, fp8$",
        ),
        ({"devices": 4}, r"no rows with num_heads 1; there are 2, 4$"),
    ],
)
def test_what_is_not_there_is_named_in_one_line(
    root: Path, changes: dict[str, Any], message: str
) -> None:
    for each in (root / "x9_sxm").glob("*/trtllm/1.2.0"):
        if each.parts[-3] != "comm":
            each.with_name("1.0.0").symlink_to(each, target_is_directory=True)
    with pytest.raises(JaxinferError, match=message) as found:
        convert(wanted(root, **changes))
    assert "\n" not in str(found.value)


def test_all_reduces_may_be_of_an_older_version(root: Path) -> None:
    """Kernels of 1.3.0, collectives of 1.2.0 and 1.4.0."""
    for each in ("gemm", "attention"):
        (root / "x9_sxm" / each / "trtllm" / "1.2.0").rename(
            root / "x9_sxm" / each / "trtllm" / "1.3.0"
        )
    newer = root / "x9_sxm" / "comm" / "trtllm" / "1.4.0"
    newer.symlink_to(newer.with_name("1.2.0"), target_is_directory=True)
    assert any(
        "comm/trtllm/1.2.0" in f for f in convert(wanted(root, version="1.3.0", devices=2)).files
    )
    newer.with_name("1.2.0").rename(newer.with_name("1.5.0"))
    with pytest.raises(JaxinferError, match=r"the nearest is 1\."):
        convert(wanted(root, version="1.3.0", devices=2))


def test_a_wheels_folders_are_known_too(root: Path, tmp_path: Path) -> None:
    wheel = tmp_path / "systems"
    for each in (root / "x9_sxm").glob("*/*/*/*.parquet"):
        new = wheel / "data" / "x9_sxm" / each.parts[-3] / each.parts[-2] / each.name
        new.parent.mkdir(parents=True, exist_ok=True)
        each.rename(new)
    (root / "x9_sxm.yaml").rename(wheel / "x9_sxm.yaml")
    assert is_published(wheel)
    assert not is_published(tmp_path)
    assert convert(wanted(wheel)).dense["qkv_proj"]


@pytest.mark.parametrize(
    ("part", "name", "value", "message"),
    [
        ("gpu", "mem_bw", "fast", r"must have gpu\.mem_bw, gpu\.mem_bw_empirical_scaling_factor"),
        ("gpu", "mem_bw", 0, r"bandwidths must be greater than 0"),
        ("gpu", "mem_empirical_constant_latency", 3.0, r"seconds below 0\.1$"),
    ],
)
def test_numbers_of_a_card_that_cannot_be(
    root: Path, part: str, name: str, value: Any, message: str
) -> None:
    path = root / "x9_sxm.yaml"
    numbers = yaml.safe_load(path.read_text())
    numbers[part][name] = value
    path.write_text(yaml.safe_dump(numbers))
    with pytest.raises(JaxinferError, match=message):
        find_card(root, None, "X9-SXM")


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), 1e6])
def test_a_time_that_cannot_be_milliseconds(tmp_path: Path, value: float) -> None:
    write(tmp_path / "t.parquet", [{"m": 1, "latency": 0.1}, {"m": 2, "latency": value}])
    with pytest.raises(JaxinferError, match=r"t\.parquet: latency goes from .* must be milliseco"):
        read_measured(tmp_path / "t.parquet", ("m",), {}, {})


def test_files_that_are_no_tables(tmp_path: Path) -> None:
    (tmp_path / "t.parquet").write_text("nothing")
    with pytest.raises(JaxinferError, match=r"t\.parquet: .*[Pp]arquet"):
        read_measured(tmp_path / "t.parquet", ("m",), {}, {})
    pq.write_table(pa.table({"m": [1]}), tmp_path / "t.parquet")
    with pytest.raises(JaxinferError, match=r"t\.parquet: lacks the column latency$"):
        read_measured(tmp_path / "t.parquet", ("m",), {}, {})


def test_of_a_point_measured_several_times_the_median_counts(tmp_path: Path) -> None:
    times = {1: [5.0, 1.0, 3.0], 2: [4.0], 3: [10.0, 2.0, 4.0, 1.0]}
    rows = [{"m": m, "latency": ms} for m, all_ms in times.items() for ms in all_ms]
    write(tmp_path / "t.parquet", rows[::-1])
    read = read_measured(tmp_path / "t.parquet", ("m",), {}, {})
    expected = {m: float(np.median(all_ms)) for m, all_ms in times.items()}
    assert dict(zip(read.points[:, 0], read.ms, strict=True)) == expected
