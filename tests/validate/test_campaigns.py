"""Rules that make a run file of a measured row."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from validate_cases import row, write_points

from jaxinfer import JaxinferError
from jaxinfer.config.run_file import RunFile
from jaxinfer.validate.campaigns import launch, read_campaigns
from jaxinfer.validate.points import Point, read_points

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
    **changes: str,
) -> RunFile:
    data = {
        "models": {"made/up": "llama-3.1-8b"},
        "cards": {"x9_sxm": "H100-SXM"},
        "rules": [VERSION, *rules],
    }
    path = tmp_path / "campaigns.yaml"
    path.write_text(yaml.safe_dump(data))
    found = read_campaigns(str(path), without)
    return launch(found, point(tmp_path, **changes), "tables", settings or {}).config


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
        ({"model_path": "made/down"}, r"^model_path is made/down: did you mean 'made/up'\?$"),
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
