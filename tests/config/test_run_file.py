"""Run files and settings: what is shared, what is a copy, what holds where nothing is said."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxinfer import JaxinferError
from jaxinfer.config.resolve import resolve
from jaxinfer.config.run_file import (
    MetricOptions,
    RunFile,
    Workload,
    apply_setting,
    as_run_file,
    load_run_file,
)
from jaxinfer.systems.single import Single
from jaxinfer.workload.arrivals import Arrivals

ROOT = Path(__file__).parents[2]


def test_what_is_not_stated() -> None:
    config = RunFile()
    assert (config.watchdog_s, config.verify_transfers, config.model) == (600, False, None)
    assert config.system == {"name": "single"}
    assert config.cluster().instances["engine"].max_num_seqs == config.engine.max_num_seqs == 64


def test_a_setting_changes_one_of_those_that_share_an_alias(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "groups: {g: {devices: 2, tensor_parallel_size: 1}}\n"
        "instances: {a: &same {group: g, page_size: 16}, b: *same}\n"
        "system: {name: data_parallel, shares: {a: &one {weight: 1, max_waiting: 1}, b: *one}}\n"
    )
    settings = ["instances.a.page_size=8", "system.shares.b.weight=3"]
    config = load_run_file(file, settings)
    assert [config.instances[name].page_size for name in "ab"] == [8, 16]
    assert [config.system["shares"][name]["weight"] for name in "ab"] == [1, 3]


def test_the_first_requests_of_a_workload() -> None:
    synthetic, arrivals = {"lengths": "sharegpt", "count": 5}, Arrivals(kind="interval", seconds=2)
    every = Workload.model_validate({"synthetic": synthetic, "arrivals": arrivals}).requests(None)
    some = {"synthetic": synthetic, "arrivals": arrivals, "limit": 3}
    assert [item.arrival for item in every] == [0, 2, 4, 6, 8]
    assert Workload.model_validate(some).requests(None) == every[:3]


@pytest.mark.parametrize("own", [False, True])
def test_whether_a_first_token_waits_for_its_kv(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system decides whether a first token waits, unless the run file does."""

    monkeypatch.setattr(Single, "ttft_counts_transfer", own)
    assert resolve(RunFile()).counts_transfer == own
    for given in (False, True):
        metrics = MetricOptions(ttft_counts_transfer=given)
        assert resolve(RunFile(metrics=metrics)).counts_transfer == given


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_entries_of_8_bits_are_not_compared_by_their_bits(dtype: str) -> None:
    data = {"groups": {"g": {}}, "instances": {"x": {"group": "g", "kv_cache_dtype": dtype}}}
    assert as_run_file(data).cluster().instances["x"].kv_cache_dtype == dtype
    with pytest.raises(
        JaxinferError, match=rf"^instances\.x\.kv_cache_dtype is {dtype}, must be auto"
    ):
        as_run_file(data | {"verify_transfers": True}).cluster()


@pytest.mark.parametrize(
    "section", [{"groups": {"g": {}}}, {"links": [{"between": ["g", "h"], "gb_s": 1.0}]}]
)
def test_groups_and_links_are_for_instances(section: dict[str, Any]) -> None:
    with pytest.raises(JaxinferError, match=r"^groups and links need instances that stand on them"):
        as_run_file(section).cluster()


def test_a_trace_s_times_are_taken_be_they_all_zero(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    head = "num_prefill_tokens,num_decode_tokens,arrived_at\n"
    workload = Workload.model_validate({"trace": str(trace), "arrivals": "trace"})
    trace.write_text(f"{head}5,6,0\n7,8,2.5\n")
    assert [item.arrival for item in workload.requests(None)] == [0, 2.5]
    trace.write_text(f"{head}5,6,0\n7,8,0\n")
    assert [item.arrival for item in workload.requests(None)] == [0, 0]


def test_an_attention_group_is_a_name_or_has_options() -> None:
    engine = {"enable_prefix_caching": False, "launch_ahead": False}
    stage = {"group": "a", "attention": ["b", {"group": "c", "num_pages": 7}]}
    instance = {"stages": [stage], **engine}
    config = as_run_file({"groups": {"a": {}, "b": {}, "c": {}}, "instances": {"i": instance}})
    (place,) = config.cluster().instances["i"].places
    assert [(each.group, each.num_pages) for each in place.attention] == [("b", None), ("c", 7)]
    replicated = as_run_file(
        {
            "groups": {"a": {"replicas": 2}, "b": {"replicas": 2}, "c": {"replicas": 2}},
            "instances": {"i": {"replicas": 2, **instance}},
        }
    )
    assert replicated.cluster().instances["i1"].places[0].attention_groups == ("b1", "c1")


def test_a_role_that_its_system_does_not_know() -> None:
    """Any word is one to the systems that say nothing of roles, a user's own among them."""
    data = yaml.safe_load((ROOT / "configs" / "cpu" / "aladdin.yaml").read_text())
    data["instances"]["d"]["role"] = "of"
    with pytest.raises(JaxinferError, match=r"^instances\.d\.role is 'of': did you mean 'off'\?$"):
        resolve(as_run_file(data))
    resolve(as_run_file(data | {"system": "least_loaded"}))


def test_a_fetch_needs_prefix_caches() -> None:
    path = ROOT / "configs" / "prefixes" / "disaggregated.yaml"
    data = yaml.safe_load(path.read_text())
    data["system"]["fetch"] = True
    resolve(as_run_file(data))
    data["engine"]["enable_prefix_caching"] = False
    with pytest.raises(JaxinferError, match=r"enable_prefix_caching is False, must be True with"):
        resolve(as_run_file(data))
    resolve(as_run_file(data | {"system": data["system"] | {"fetch": False}}))


def test_axes_are_set_by_their_dotted_keys() -> None:
    data: dict[str, Any] = {"axes": {"engine.seed": [1]}, "planner": {"axes": {}}}
    apply_setting(data, "axes.workload.arrivals.rate=[3]")
    apply_setting(data, "planner.axes.engine.page_size=[16, 32]")
    assert data == {
        "axes": {"engine.seed": [1], "workload.arrivals.rate": [3]},
        "planner": {"axes": {"engine.page_size": [16, 32]}},
    }


def test_half_precision_is_answered_with_what_runs() -> None:
    with pytest.raises(JaxinferError, match=r"^engine\.dtype: float16 is not supported: bfloat16"):
        RunFile.model_validate({"engine": {"dtype": "float16"}})
