"""Modelled steps as two halves in turn: by hand, chosen by time, and whole runs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from spread_cases import LINK, ROWS, modelled, run_file, served, work_with

from jaxinfer import JaxinferError
from jaxinfer.serving.batch import Work
from jaxinfer.serving.features.half_batches import LayerTimes, in_turn
from jaxinfer.simulate.spread import ModelledSpreadStage


def halved(rows: list[tuple[int, int]], *heads: int) -> Work:
    """Halves of every other row."""
    halves = [work_with(rows[first::2], *heads) for first in (0, 1)]
    return replace(work_with(rows, *heads), halves=halves)


def stage_of(file: dict[str, Any]) -> ModelledSpreadStage:
    (stage,) = modelled(file).cost.parts  # type: ignore[attr-defined]
    assert isinstance(stage, ModelledSpreadStage)
    return stage


def test_a_step_as_halves_by_hand() -> None:
    """Two decodes that see 100 entries each, one KV head here and one there, six layers."""
    stage = stage_of(run_file())
    work = halved([(99, 1)] * 2, 1, 1)
    # Weights of a layer, 2 bytes each at 10^6 per second, and what a token reads and writes: of
    # queries, keys and values 16 * 32, outputs 16 * 16, and three products of 16 * 16.
    weights, moved = 2 * (512 + 256 + 768), 2 * (16 + 32 + 32 + 16 + 32 + 32)
    dense = (weights + moved) * 1e-6
    assert stage.dense(1) == pytest.approx(dense, rel=1e-12)
    half = LayerTimes(dense, 1.6e-3, [(1.6e-3 + 48e-6, 1.0)])
    found = stage.layer(work.halves[0])
    assert (found.dense, found.own) == pytest.approx((half.dense, half.own))
    assert found.others == [(pytest.approx(1.6e-3 + 48e-6), 1.0)]
    head = stage.seconds(replace(work, halves=())) - 6 * (
        stage.dense(2) + 2 * (1.6e-3 + 48e-6) + 1.0
    )
    assert stage.seconds(work) == pytest.approx(in_turn(6, half, half) + head, rel=1e-12)


@given(ROWS.filter(lambda rows: len(rows) > 1))
def test_with_all_heads_at_home_a_step_is_not_cut(rows: list[tuple[int, int]]) -> None:
    """The step takes the same to the last bit."""
    stage = stage_of(run_file())
    work = halved(rows, 2, 0)
    assert stage.seconds(work) == stage.seconds(replace(work, halves=()))
    assert stage.seconds(work) == stage.seconds(replace(work, halves=(), shards=()))
    assert stage.layer(work).others == [(0.0, 0.0)]


def test_padded_steps_have_padded_halves() -> None:
    file = run_file(engine={"token_buckets": [4, 8]})
    plain, padded = stage_of(run_file()), modelled(file).cost
    work = halved([(0, 3), (9, 1), (0, 2), (9, 1)], 1, 1)
    first, second = work.halves
    halves = [replace(first, tokens=8), replace(second, tokens=4)]
    assert (first.tokens, second.tokens) == (5, 2)
    assert padded.stages(work) == [
        plain.seconds(replace(work, tokens=8, halves=[halves[0], second]))
    ]


# A link that takes as long as some layers, and rows that come and go.
RUN = [(5, 9), (3, 7), (4, 9), (9, 30), (7, 3)]


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "1" / "steps.jsonl").read_text().splitlines()]


def test_steps_are_halves_where_these_take_less(tmp_path: Path) -> None:
    """Steps take the lesser of both times of the same rows."""
    fast = [LINK | {"between": ["a", "w"], "latency_s": 0.005}]
    seconds = {}
    for option in ("never", "always", "by_time"):
        file = run_file(engine={"half_batches": option, "max_num_seqs": 5}, links=fast)
        served(file, *RUN, folder=tmp_path / option)
        steps = lines(tmp_path / option)
        seconds[option] = [step["end"] - step["start"] for step in steps if "instance" in step]
        cut = [step["halves"] for step in steps if "halves" in step]
        rows = [step["rows"] for step in steps if "halves" in step]
        assert [sum(each) for each in cut] == rows
        seconds[f"{option}, cut"] = [float("halves" in step) for step in steps]
    assert not any(seconds["never, cut"])
    assert 0 < sum(seconds["by_time, cut"]) < sum(seconds["always, cut"])
    least = [min(both) for both in zip(seconds["never"], seconds["always"], strict=True)]
    assert seconds["by_time"] == pytest.approx(least, abs=3e-6)


def test_a_system_knows_times_of_dense_layers_where_steps_may_be_cut() -> None:
    for option in ("never", "by_time"):
        instance = modelled(run_file(engine={"half_batches": option}))
        own, other = instance.new_instance("x", None, True, False, len).shards
        assert other.dense is None
        assert (own.dense is None) == (option == "never")
    assert own.dense
    assert own.dense(7) == stage_of(run_file()).dense(7)


def test_without_attention_groups_no_step_can_be_cut() -> None:
    file = run_file([{"group": "a"}], "single", {"half_batches": "by_time"})
    message = r"half_batches is by_time, must be never without attention groups"
    with pytest.raises(JaxinferError, match=message):
        modelled(file)
