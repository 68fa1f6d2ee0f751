"""Groups that share a device: tokens as of one instance, weights once, stages that do not wait."""

from pathlib import Path
from typing import Any

import jax
import pytest
from cluster_cases import Loader, roomy, set_system
from cluster_checks import Done, Ran, check_transfers, serve, token_bytes

from jaxinfer import LLM
from jaxinfer.runtime.stage.stage import Stage
from scripts.bench import one_card

GROUPS: dict[str, Any] = {"g": {}, "h": {"shares": "g"}}
INSTANCES: dict[str, Any] = {
    "x": {"group": "g"} | roomy(16),
    "y": {"stages": [{"group": "h", "layers": 1}, {"group": "g2", "layers": 3}]} | roomy(8),
}


@pytest.fixture(scope="module")
def shared(loader: Loader) -> LLM:
    groups = GROUPS | {"g2": {"shares": "g"}}
    return loader.load("two", groups=groups, instances=INSTANCES, verify_transfers=True)


def stages(llm: LLM, instance: str) -> list[Stage]:
    found = llm.cluster.engines[instance].stages
    assert all(isinstance(stage, Stage) for stage in found)
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("ends", ["xy", "yx"])
def test_kv_goes_over_within_a_device(
    shared: LLM, expected: dict[str, list[Done]], ends: str, tmp_path: Path
) -> None:
    """A slab is placed as the array that it is: what lies there afterwards is what was sent."""
    partial, chunked = ends
    shared.reset_prefix_cache()
    cut = {"partial": partial, "chunked": chunked, "cut_share": 0.6}
    set_system(shared, {"name": "cronus", **cut})
    assert serve(shared, run_dir=tmp_path) == expected["two"]
    ran = Ran.last(tmp_path)
    check_transfers(ran, token_bytes("two"))
    assert len(ran.record.transfers) > 5
    assert {(t.source, t.dest) for t in ran.record.transfers} == {(partial, chunked)}


def test_what_lies_on_the_device(shared: LLM) -> None:
    """Each parameter once, and pages of each instance's own."""
    own, others = stages(shared, "x"), stages(shared, "y")
    (device,) = {device for stage in [*own, *others] for device in stage.plan.devices}
    leaves = {id(leaf) for leaf in jax.tree.leaves(own[0].parameters)}
    for stage in others:
        assert {id(leaf) for leaf in jax.tree.leaves(stage.parameters)} < leaves
    pages = [leaf for stage in [*own, *others] for leaf in jax.tree.leaves(stage.kv)]
    places = {leaf.unsafe_buffer_pointer() for leaf in pages}
    assert len(places) == len(pages)
    assert {leaf.devices() == {device} for leaf in pages} == {True}


def test_stages_of_two_groups_are_a_pipeline(shared: LLM) -> None:
    """Though they have one mesh: each ends by itself, and there is a step in flight for each."""
    worker = shared.cluster.engines["y"].worker
    assert stages(shared, "y")[0].plan.mesh == stages(shared, "y")[1].plan.mesh
    assert worker.parts == [[0], [1]]


@pytest.mark.slow
def test_all_systems_on_one_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the suite has them: tokens of ``single``, and the simulator decides alike."""
    monkeypatch.chdir(Path(one_card.__file__).parents[2])
    exact, _ = one_card.passes(tmp_path, is_rehearsal=True)
    suite = one_card.Suite(tmp_path, one_card.CARDS[0], is_rehearsal=True)
    rows = [*one_card.rows_of(suite, [exact], one_card.SYSTEMS, seconds=1e9)]
    assert [row["system"] for row in rows] == list(one_card.SYSTEMS)
    for row in rows:
        assert row["result"] == "ok", row
        compared = suite.against(exact, row)
        assert (compared["equal"], compared["apart"]) == (8, 0), row
        assert row["ledger"] == "the same in both worlds"
    moved = {row["system"] for row in rows if row["transfers"]}
    assert moved >= {*one_card.SYSTEMS} - {"single", "aladdin", "takeover"}
