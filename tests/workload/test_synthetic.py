"""Lengths without data, against published means, medians and percentiles."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxinfer import JaxinferError
from jaxinfer.config.run_file import Workload, as_run_file
from jaxinfer.workload.lengths import BenchRequest
from jaxinfer.workload.synthetic import Synthetic

# Mean, median and 90th percentile of prompts, then of outputs: Vidur, Table 1; of Azure's traces
# Splitwise's medians (section III-B) and the public data's means.
PUBLISHED = {
    "azure_conversation": (1154.7, 1020, None, 211.1, 129, None),
    "azure_code": (2047.8, 1500, None, 27.9, 13, None),
    "arxiv_4k": (2588, 2730, 3702, 291, 167, 372),
    "chat_1m_4k": (686, 417, 1678, 197, 139, 484),
    "bwb_4k": (1067, 1037, 1453, 1612, 1601, 2149),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_as_published(name: str) -> None:
    drawn = Synthetic(lengths=name, count=20_000).requests()
    prompts = np.array([item.prompt_len for item in drawn])
    outputs = np.array([item.max_tokens for item in drawn])
    expected = PUBLISHED[name]
    for lengths, (mean, median, p90) in ((prompts, expected[:3]), (outputs, expected[3:])):
        assert np.mean(lengths) == pytest.approx(mean, rel=0.13)
        assert np.median(lengths) == pytest.approx(median, rel=0.04)
        if p90:
            assert np.percentile(lengths, 90) == pytest.approx(p90, rel=0.12)
    if name in ("chat_1m_4k", "bwb_4k"):
        assert (prompts + outputs).max() == 4096  # Pairs beyond it are drawn again.
    assert abs(np.corrcoef(prompts, outputs)[0, 1]) < (0.2 if name.endswith("4k") else 0.03)


def workload(**options: Any) -> list[BenchRequest]:
    return as_run_file({"workload": options}).requests()


@pytest.mark.parametrize("name", ["HPLD", "HPHD", "LPHD", "LPLD"])
def test_classes(name: str, tmp_path: Path) -> None:
    """Heavy is more than 512 tokens of prompt, more than 128 of output."""
    trace = tmp_path / "trace.csv"
    lengths = [(p, o) for p in (1, 512, 513, 4000) for o in (1, 128, 129, 900)]
    rows = [f"{i},{p},{o}" for i, (p, o) in enumerate(lengths)]
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + "\n".join(rows) + "\n")
    from_trace = workload(trace=str(trace), only=name, arrivals="trace")
    assert [(item.prompt_len, item.max_tokens) for item in from_trace] == [
        (p, o) for p, o in lengths if (p > 512, o > 128) == (name[0] == "H", name[2] == "H")
    ]
    assert all(lengths[int(item.arrival)][0] == item.prompt_len for item in from_trace)
    drawn = workload(synthetic={"lengths": "azure_conversation", "count": 50, "seed": 1}, only=name)
    assert len(drawn) == 50
    assert {(i.prompt_len > 512, i.max_tokens > 128) for i in drawn} == {
        (name[0] == "H", name[2] == "H")
    }


def test_the_same_for_the_same_seed() -> None:
    one, same, other = (
        workload(synthetic={"lengths": "sharegpt", "count": 20, "seed": seed}) for seed in (1, 1, 2)
    )
    assert one == same
    assert one != other
    assert len(workload(synthetic="sharegpt", limit=7)) == 7
    assert len(workload(synthetic="sharegpt")) == 1000


def test_only_draws_in_a_row_tell_that_a_class_is_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    """The 1,791 others drawn with 300 of this class come at most 35 in a row."""
    monkeypatch.setattr("jaxinfer.workload.synthetic._PATIENCE", 36)
    one = Synthetic(lengths="azure_conversation", count=300, seed=1)
    assert len(one.requests("LPHD")) == 300


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"synthetic": "azure_convers"}, "lengths is .azure_convers.: .*_conversation"),
        ({"synthetic": "sharegpt", "trace": "x.csv"}, "both a trace, x.csv, and synthetic"),
        ({"synthetic": "sharegpt", "arrivals": "trace"}, "no times of a trace"),
        ({"synthetic": "bwb_4k", "only": "LPLD"}, "only LPLD: none of 10000 draws of bwb_4k"),
        ({}, "no trace: give --workload"),
    ],
)
def test_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(JaxinferError, match=message):
        workload(**options)


def test_a_trace_without_any_of_the_class(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("num_prefill_tokens,num_decode_tokens\n5,5\n")
    with pytest.raises(JaxinferError, match="none of its 1 is HPLD"):
        workload(trace=str(trace), only="HPLD")
    assert Workload(trace=str(trace)).requests(None)[0].prompt_len == 5
