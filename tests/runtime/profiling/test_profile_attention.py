"""Real runs know how long attention takes where KV heads may lie, by measuring it."""

import json
from pathlib import Path
from typing import Any

import pytest
from cluster_cases import Loader, load, roomy
from cluster_checks import Done, serve
from scatter import spread

from jaxinfer.config.resolve import resolve
from jaxinfer.config.run_file import RunFile
from jaxinfer.lab.validate.same_decisions import check_decisions
from jaxinfer.runtime.profiling import profile_attention as measuring
from jaxinfer.runtime.profiling.profile import Needs, profile_key
from jaxinfer.runtime.profiling.profile_attention import prepare_attention, profile_attention
from jaxinfer.steps import profile as stored


@pytest.fixture
def own_profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(stored, "FOLDER", tmp_path / "profiles")
    return tmp_path / "profiles"


def slow(**system: Any) -> dict[str, Any]:
    """A device with the layers, and one that does its attention 20 times."""
    sections = spread([30], **roomy(16))
    sections["groups"]["a0"] = {"emulate": {"slowdown": 20}}
    return sections | {"system": {"name": "hetis"} | system}


def test_heads_are_placed_by_what_was_measured(
    loader: Loader,
    expected: dict[str, list[Done]],
    own_profiles: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = loader.load("two", **slow(), ledger=True)
    own, far = [shard.fit for shard in llm.engine.new_kv().shards]
    assert own is not None
    assert far is not None
    assert (own.exchange, own.exchange_per_pair) == (0.0, 0.0)
    assert far.exchange + far.exchange_per_pair > 0
    # All its attention 20 times, on the same cores; whatever else they do.
    ratio = far.seconds(4, 400) / own.seconds(4, 400)
    assert ratio > 3
    assert serve(llm, run_dir=tmp_path / "runs") == expected["two"]
    found = check_decisions(tmp_path / "runs" / "1")
    assert found.difference is None
    (path,) = own_profiles.glob("*.attention.json")
    shards = json.loads(path.read_text())["shards"]
    assert [shard["group"] for shard in shards] == ["p", "a0"]
    # Up to all heads of a full batch, or a page of each.
    assert max(heads for heads, _, _ in shards[0]["attention"]) == 4 * 2
    assert {heads for heads, _ in shards[1]["exchange"]} == {1, 2, 4, 8}
    for heads, entries, seconds in shards[1]["attention"]:
        assert entries % heads == 0
        assert heads * -(-entries // heads // 16) <= 2 * 29
        assert seconds > 0
    # It is found again, and holds for a device that is as slow.
    monkeypatch.setattr(measuring, "profile_attention", None)
    llm.engine.attention.clear()
    needs = {"": Needs(llm.cluster, llm.model, fits=False, attention=True)}
    prepare_attention(needs, lambda *_: None)
    assert [shard.fit for shard in llm.engine.new_kv().shards] == [own, far]
    (stage,) = profile_key(llm.engine, llm.model)["stages"]
    assert [place["repeats"] for place in stage["attention"]] == [20]


def test_figures_given_by_hand_are_not_measured() -> None:
    given = {name: {"per_pair": 1e-6, "per_entry": 1e-8} for name in ("p", "a0")}
    for sections, measured in ((slow(), True), (slow(attention=given), False)):
        config = RunFile.model_validate({"model": "m", **sections})
        assert resolve(config).needs_attention_fits == measured


@pytest.mark.slow
def test_each_stage_is_measured_on_its_own_devices(loader: Loader, own_profiles: Path) -> None:
    sections = spread([None], **roomy(16))
    sections["groups"] = {"p": {}, "q": {}, "a0": {}}
    stages = [{"group": "p", "layers": 3, "attention": ["a0"]}, {"group": "q", "layers": 1}]
    sections["instances"]["x"]["stages"] = stages
    llm = loader.load("two", **sections)
    first, second, plain = profile_attention("x", llm.engine, "m", lambda *_: None).shards
    assert (first.group, second.group, plain.group) == ("p", "a0", "q")
    assert first.attention
    assert second.exchange
    assert not plain.attention


@pytest.mark.slow
def test_what_other_processes_lend_is_measured_with_the_way_there(
    models: dict[str, Path], tmp_path: Path, own_profiles: Path
) -> None:
    """The process with the stage measures, and waits for what comes back."""
    sections = spread([None, None], **roomy(16))
    for group in sections["groups"].values():
        group["process"] = "own"
    llm = load(models["two"], tmp_path, **sections)
    own, *lent = profile_attention("x", llm.engine, "m", lambda *_: None).shards
    assert [own.group, *(shard.group for shard in lent)] == ["p", "a0", "a1"]
    assert own.dense
    for shard in lent:
        assert not shard.exchange
        assert not shard.dense
        assert [point[:2] for point in shard.attention] == [point[:2] for point in own.attention]
        assert all(seconds > 0 for _, _, seconds in shard.attention)
