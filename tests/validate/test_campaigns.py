"""Rules that make a run file of a measured row."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from validate_cases import row, write_points

from jaxinfer import JaxinferError
from jaxinfer.config.run_file import RunFile
from jaxinfer.lab.validate.campaigns import launch, read_campaigns
from jaxinfer.lab.validate.points import Point, read_points

SHIPPED = "campaigns.yaml"
VERSION = {"name": "version", "when": {}, "set": {"simulate.tables.version": "1"}}


def point(tmp_path: Path, **changes: str) -> Point:
    (found,) = read_points(write_points(tmp_path / "points.csv", [row(**changes)]))
    return found


def config(
    tmp_path: Path,
    rules: list[dict[str, Any]],
    settings: dict[str, Any] | None = None,
    without: tuple[str, ...] = (),
    named: tuple[str, ...] = (),
    **changes: str,
) -> RunFile:
    data = {
        "models": {"made/up": "llama-3.1-8b"},
        "cards": {"x9_sxm": "H100-SXM"},
        "rules": [VERSION, *rules],
    }
    path = tmp_path / "campaigns.yaml"
    path.write_text(yaml.safe_dump(data | {"named": list(named)}))
    found, given = read_campaigns(str(path), without), point(tmp_path, **changes)
    found.check_columns(given.row)
    return launch(found, given, "tables", settings or {}).config


def sets(name: str, when: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {"name": name, "when": when, "set": {f"engine.{k}": v for k, v in options.items()}}


def test_of_two_rules_the_later_one_counts_and_settings_last(tmp_path: Path) -> None:
    rules = [sets("a", {}, max_num_seqs=1, page_size=8), sets("b", {"isl": 64}, max_num_seqs=2)]
    assert config(tmp_path, rules).engine.max_num_seqs == 2
    assert config(tmp_path, rules, without=("b",)).engine.max_num_seqs == 1
    assert config(tmp_path, rules, {"engine.max_num_seqs": 3}).engine.max_num_seqs == 3
    assert config(tmp_path, rules).engine.page_size == 8


@pytest.mark.parametrize(
    ("when", "holds"),
    [
        ({"backend": "trtllm", "tp": [1, 2]}, True),
        ({"tp": [2, 4]}, False),
        ({"id": "a"}, True),
        ({"id": "b"}, False),
        ({"backend_version": r"1\.[23]"}, True),
        ({"backend_version": r"1\.3"}, False),
        ({"concurrency": {"above": 3}}, True),
        ({"concurrency": {"above": 4}}, False),
    ],
)
def test_a_rule_holds_for_rows_with_all_that_it_says(
    tmp_path: Path, when: dict[str, Any], holds: bool
) -> None:
    assert config(tmp_path, [sets("a", when, max_num_seqs=7)]).engine.max_num_seqs == (
        7 if holds else 64
    )


def test_numbers_may_be_sums_of_a_rows(tmp_path: Path) -> None:
    """4 at once and two prompts of 64 tokens, rounded up to 32."""
    value = {"concurrency": 1, "isl": 2, "add": 9, "multiple": 32}
    found = config(tmp_path, [sets("a", {}, max_num_batched_tokens=value)])
    assert found.engine.max_num_batched_tokens == 160
    inner = {"name": "mixed", "enough_tokens": {"isl": 1, "add": 6}}
    rules = [{"name": "b", "when": {}, "set": {"engine.policies.batching": inner}}]
    found = config(tmp_path, rules)
    assert found.engine.policies.batching == {"name": "mixed", "enough_tokens": 70}


def test_lengths_are_even_from_the_shortest_on(tmp_path: Path) -> None:
    rules = [{"name": "a", "when": {}, "set": {"shortest": 0.5, "rounds": 25}}]
    requests = config(tmp_path, rules).requests()
    assert len(requests) == 100
    assert {r.prompt_len for r in requests} <= set(range(32, 65))
    assert {r.max_tokens for r in requests} == {4, 5, 6, 7, 8}
    assert {r.prompt_len for r in config(tmp_path, []).requests()} == {64}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_path": "made/down"}, r"^model_path is made/down: known: made/up$"),
        ({"system": "x8"}, r"^system is x8: "),
        ({"pp_size": "2.0"}, r"^pp_size is 2: points with pipelines are not simulated$"),
    ],
)
def test_rows_of_which_no_run_file_can_be_made(
    tmp_path: Path, changes: dict[str, str], message: str
) -> None:
    with pytest.raises(JaxinferError, match=message):
        config(tmp_path, [], **changes)


def test_files_of_rules_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(JaxinferError, match=r"^--without a: no such rule, "):
        config(tmp_path, [], without=("a",))
    with pytest.raises(JaxinferError, match=r"^campaigns .*rules\[1\]\.set"):
        config(tmp_path, [{"name": "a", "when": {}, "set": {}}])


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"when": {"no_col": "3"}}, r"^rule a: when: no column 'no_col', known: "),
        ({"when": {"backnd": "x"}}, r"^rule a: when: no column 'backnd', did you mean 'backend'\?"),
        (
            {"when": {"isl": {"below": 3}}},
            r"rules\[1\]\.when\.isl\.below: unknown option, known: abo",
        ),
        (
            {"when": {"backend": {"above": 3}}},
            r"when\.backend: \{'above': 3\}, is for concurrency, ",
        ),
        ({"when": {"tp": "4"}}, r"when\.tp: '4', must be an integer, or a list of them$"),
        ({"when": {"backend_version": 0.1}}, r"when\.backend_version: 0\.1, must be text, as the"),
        ({"when": {"id": []}}, r"when\.id: \[\], must be text"),
        ({"when": {"id": "("}}, r"when\.id: '\(': no regular expression: missing \)"),
        (
            {"set": {"first_wave": 5}},
            r"rules\[1\]\.set\.first_wave is 5, must be less than or equal",
        ),
        ({"set": {"rounds": 0}}, r"set\.rounds is 0, must be greater than or equal to 1"),
        ({"set": {"shortest": -1}}, r"set\.shortest is -1, must be greater than 0"),
        (
            {"set": {"rounds": 1000000}},
            r"^1000000 rounds of 4 at once are 4,000,000 requests, must",
        ),
        (
            {"set": {"engine.x": {"isl": 1, "multiple": 0}}},
            r"set\.engine\.x: .*: multiple must be 1 ",
        ),
        ({"set": {"engine.x": {"isl": 1.5}}}, r"set\.engine\.x: .*, must have integers alone$"),
        ({"set": {"workload.seed": 1}}, r"^workload\.seed: the row is the workload; "),
    ],
)
def test_rules_that_no_row_can_be_held_to(
    tmp_path: Path, rule: dict[str, Any], message: str
) -> None:
    with pytest.raises(JaxinferError, match=message):
        config(tmp_path, [{"name": "a", "when": {}, "set": {"rounds": 2}} | rule])


def test_a_value_that_no_rule_names_is_refused(tmp_path: Path) -> None:
    """By default a format; other columns as the file has it. An empty cell needs no name."""
    rules = [sets("a", {"gemm_quant_mode": ["fp8"], "isl": 64}, max_num_seqs=1)]
    named = ("gemm_quant_mode",)
    assert read_campaigns(SHIPPED).named[:2] == ("backend", "backend_version")
    config(tmp_path, rules, named=named)
    config(tmp_path, rules, named=named, gemm_quant_mode="fp8")
    with pytest.raises(JaxinferError, match=r"^gemm_quant_mode is 'int4', which no rule is for: "):
        config(tmp_path, rules, named=named, gemm_quant_mode="int4")
    with pytest.raises(JaxinferError, match=r"is 'fp8': no rule is for it with isl 65$"):
        config(tmp_path, rules, named=named, gemm_quant_mode="fp8", isl="65")
    with pytest.raises(JaxinferError, match=r"^named: no column 'color', known: "):
        config(tmp_path, rules, named=("color",))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backend": "vLLM"}, r"^backend is 'vLLM', which no rule is for: known: sglang, trtllm, "),
        ({"backend": "lmdeploy"}, r"^backend is 'lmdeploy', which no rule is for: known: sglang, "),
        ({"backend_version": "0.6.0"}, r"^backend_version is '0\.6\.0', .* known: 0\\\.1\[124-9\]"),
        ({"backend_version": "banana"}, r"^backend_version is 'banana', which no rule is for"),
        (
            {"gemm_quant_mode": "int4"},
            r"^gemm_quant_mode is 'int4', which no rule is for: known: b",
        ),
        ({"gemm_quant_mode": "nvfp4"}, r"^gemm_quant_mode is 'nvfp4': no rule is for it with prec"),
        ({"precision": "int4"}, r"^precision is 'int4', which no rule is for"),
        (
            {"gemm_quant_mode": "", "precision": "fp8"},
            r"^gemm_quant_mode is '': no rule is for it ",
        ),
        ({"moe_quant_mode": "int4"}, r"^moe_quant_mode is 'int4', which no rule is for"),
    ],
)
def test_what_the_rules_that_ship_cannot_simulate(
    tmp_path: Path, changes: dict[str, str], message: str
) -> None:
    known = {"model_path": "meta-llama/Llama-3.1-70B", "system": "h200_sxm", "backend": "vllm",
             "backend_version": "0.19.0", "gemm_quant_mode": "fp8", "precision": "fp8"}  # fmt: skip
    shipped = read_campaigns(SHIPPED)
    assert launch(shipped, point(tmp_path, **known), "t", {}).simulated_as == (
        "scheduler vllm-0.19, tables 0.19.0"
    )
    with pytest.raises(JaxinferError, match=message):
        launch(shipped, point(tmp_path, **known | changes), "t", {})


def test_the_rules_that_ship_tell_campaigns_apart(tmp_path: Path) -> None:
    shipped = read_campaigns(SHIPPED)
    common = {"model_path": "meta-llama/Llama-3.1-70B", "system": "h200_sxm", "isl": "1024",
              "osl": "1024", "gemm_quant_mode": "fp8"}  # fmt: skip
    ours = launch(shipped, point(tmp_path, id="meta", **common), "t", {}).config.engine
    theirs = launch(shipped, point(tmp_path, id="2026_03_25_x", **common), "t", {})
    assert ours.max_num_batched_tokens == 2528  # 4 + 1024 + 1500, in blocks of 32.
    assert ours.max_num_seqs == 4
    engine = theirs.config.engine
    assert engine.max_num_batched_tokens == 16384
    assert engine.policies.batching == {
        "name": "mixed",
        "whole_prompts": True,
        "wait_steps": 20,
        "wait_share": 0.9,
    }
    assert theirs.first_wave is None
    assert {r.max_tokens for r in theirs.config.requests()} <= set(range(819, 1025))


def test_replicas_of_attention_share_the_experts(tmp_path: Path) -> None:
    """Two by four ways of experts on two GPUs each are four replicas."""
    changes = {"tp_size": "2.0", "moe_tp_size": "2.0", "moe_ep_size": "4.0"}
    found = config(tmp_path, [], **changes)
    assert list(found.instances or ()) == [f"engine{number}" for number in range(4)]
    assert {group.devices for group in (found.groups or {}).values()} == {2}
    assert found.simulate.shared_experts == ("engine0", "engine1", "engine2", "engine3")
    assert not config(tmp_path, [], tp_size="2.0").simulate.shared_experts


def test_vllm_prepares_no_step_ahead_before_014(tmp_path: Path) -> None:
    campaigns = read_campaigns(SHIPPED)
    for version, steps in (("0.12.0", 1), ("0.18.0", 3)):
        given = point(
            tmp_path,
            backend="vllm",
            backend_version=version,
            system="h200_sxm",
            model_path="openai/gpt-oss-120b",
        )
        engine = launch(campaigns, given, "tables", {}).config.engine
        assert (engine.max_in_flight or 3) == steps
