"""Modelled stages whose FFN is on another group: by hand, by events, their memory, whole runs."""

import json
import random
from collections.abc import Sequence
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
from spread_cases import CARD, MODEL, PEAK, modelled, served

from jaxinfer import JaxinferError
from jaxinfer.lab.validate.replay import replay
from jaxinfer.serving.batch import Work
from jaxinfer.simulate.costs.roofline import RooflineStage
from jaxinfer.simulate.ffn import ModelledFfnStage, PartTimes, in_turns

LINK = {"between": ["a", "f"], "gb_s": 1e-3, "latency_s": 0.25}


def run_file(engine: dict[str, Any] = {}, **sections: Any) -> dict[str, Any]:  # noqa: B006
    one = {"page_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 8, "launch_ahead": False}
    one |= {"enable_prefix_caching": False, "num_pages": 50}
    return {
        "model": "small",
        "models": {"small": MODEL},
        "gpus": {"card": CARD},
        "groups": {name: {"kind": "card"} for name in "af"},
        "links": [LINK],
        "instances": {"x": one | {"stages": [{"group": "a", "ffn": "f"}]} | engine},
        "simulate": PEAK,
        "system": "single",
    } | sections


def stage_of(file: dict[str, Any]) -> ModelledFfnStage:
    (stage,) = modelled(file).cost.parts  # type: ignore[attr-defined]
    assert isinstance(stage, ModelledFfnStage)
    return stage


def decodes(*contexts: int) -> Work:
    """Return the work of decodes, of which each sees the given number of entries."""
    rows = len(contexts)
    return Work(rows, rows, rows, rows, sum(contexts), [], rows)


def test_a_layer_by_hand() -> None:
    """Two decodes that see 100 entries each, at 10^6 bytes per second; 10^9 FLOPs take no time."""
    stage = stage_of(run_file())
    found = stage.part(decodes(100, 100))
    # Weights of queries, keys, values and output, 2 bytes each; what a token reads and writes; and
    # keys and values of two heads of four numbers.
    projections = 2 * (16 * 32 + 16 * 16) + 2 * 2 * (16 + 32 + 16 + 16)
    entries = 200 * 2 * 2 * 4 * 2
    assert found.attention == pytest.approx((projections + entries) * 1e-6, rel=1e-12)
    ffn = 2 * (3 * 16 * 16) + 2 * 2 * (16 + 32 + 16 + 16)
    assert found.ffn == pytest.approx(ffn * 1e-6, rel=1e-9)
    assert found.exchange == pytest.approx(2 * 16 * 2 * 1e-6, rel=1e-12)
    layer = found.attention + found.ffn + 2 * (found.exchange + 0.25)
    head = 2 * (16 * 100 + 2 * 116) * 1e-6
    assert stage.seconds(decodes(100, 100)) == pytest.approx(6 * layer + head, rel=1e-9)


def test_on_equal_gpus_the_parts_add_up_to_a_whole_layer() -> None:
    """Of a chunk and a decode; without the exchange, the step takes as long as on one group."""
    whole = run_file({"stages": [{"group": "a"}]}, groups={"a": {"kind": "card"}}, links=[])
    (alone,) = modelled(whole).cost.parts  # type: ignore[attr-defined]
    assert isinstance(alone, RooflineStage)
    stage, work = stage_of(run_file()), Work(5, 1, 2, 1, 31, [(9, 4)], 1)
    exchange = 6 * 2 * (stage.part(work).exchange + 0.25)
    assert stage.seconds(work) - exchange == pytest.approx(alone.seconds(work), rel=1e-9)


@pytest.mark.parametrize(("own", "ffn"), [(2.0, 1.0), (1.0, 4.0), (2.0, 4.0)])
def test_emulated_groups_are_gpus_of_lower_rates(own: float, ffn: float) -> None:
    def card(slowdown: float) -> dict[str, Any]:
        lower = {name: CARD[name] / slowdown for name in ("bf16_tflops", "memory_gb_s")}  # type: ignore[operator]
        return CARD | lower

    slow = {"a": own, "f": ffn}
    groups = {name: {"kind": "card", "emulate": {"slowdown": n}} for name, n in slow.items()}
    file = run_file({"micro_batches": 2}, groups=groups)
    like = run_file(
        {"micro_batches": 2},
        gpus={name: card(n) for name, n in slow.items()},
        groups={name: {"kind": name} for name in slow},
    )
    work = Work(8, 8, 8, 8, 800, [], 8)
    work.halves = [decodes(*[100] * 4)] * 2
    assert stage_of(file).seconds(work) == pytest.approx(stage_of(like).seconds(work), rel=1e-9)


def by_events(layers: int, parts: Sequence[PartTimes], latency: float) -> float:
    """Each resource serves what has come to it, first come, first served, as events tell."""
    order = count()
    events = [(0.0, next(order), 0, 0, part) for part in range(len(parts))]
    free = [0.0] * 4
    end = 0.0
    while events:
        events.sort()
        time, _, stop, layer, part = events.pop(0)
        if stop == 4:
            end = max(end, time)
            if layer + 1 < layers:
                events.append((time, next(order), 0, layer + 1, part))
            continue
        times = parts[part]
        busy = (times.attention, times.exchange, times.ffn, times.exchange)[stop]
        free[stop] = max(free[stop], time) + busy
        late = latency if stop in (1, 3) else 0.0
        events.append((free[stop] + late, next(order), stop + 1, layer, part))
    return end


def test_turns_are_those_of_queues() -> None:
    """Of one to six micro-batches with random times, each resource the slowest in some."""
    rng = random.Random(0)
    for _ in range(400):
        scale = [rng.choice((0.1, 1, 3)) for _ in range(3)]
        one = PartTimes(*(each * rng.random() for each in scale))
        parts = [one] * rng.randint(1, 6)
        layers, latency = rng.choice((1, 2, 5, 40)), rng.choice((0.0, 0.3))
        found = in_turns(layers, parts, latency)
        assert found == pytest.approx(by_events(layers, parts, latency), rel=1e-9)


def test_unlike_micro_batches_keep_their_order() -> None:
    """Programs run as they were launched: layer by layer, and in each in the same order."""
    rng = random.Random(1)
    for _ in range(200):
        parts = [PartTimes(rng.random(), rng.random(), rng.random() / 3) for _ in range(3)]
        layers, latency = rng.choice((1, 7, 60)), rng.choice((0.0, 0.5))
        ends: dict[tuple[str, int, int], float] = {}

        def end(what: str, layer: int, part: int, ready: float, busy: float) -> float:
            before = (part - 1, layer) if part else (len(parts) - 1, layer - 1)  # noqa: B023
            last = ends.get((what, before[1], before[0]), 0.0)  # noqa: B023
            ends[what, layer, part] = max(last, ready) + busy  # noqa: B023
            return ends[what, layer, part]  # noqa: B023

        back = [0.0] * 3
        for layer in range(layers):
            for number, part in enumerate(parts):
                time = end("attention", layer, number, back[number], part.attention)
                time = end("there", layer, number, time, part.exchange) + latency
                time = end("ffn", layer, number, time, part.ffn)
                back[number] = end("back", layer, number, time, part.exchange) + latency
        assert in_turns(layers, parts, latency) == pytest.approx(max(back), rel=1e-9)


@pytest.mark.parametrize(
    ("part", "parts", "layer"),
    [
        # One part waits for all; two hide the shorter side; four hide the link, too.
        (PartTimes(3.0, 2.0, 1.0), 1, 7.0),
        (PartTimes(3.0, 2.0, 1.0), 2, 7.0),
        (PartTimes(3.0, 2.0, 1.0), 4, 12.0),
        (PartTimes(2.0, 3.0, 1.0), 4, 12.0),
        (PartTimes(1.0, 2.0, 4.0), 4, 16.0),
    ],
)
def test_layers_in_the_steady_state(part: PartTimes, parts: int, layer: float) -> None:
    more = in_turns(1000, [part] * parts) - in_turns(900, [part] * parts)
    assert more == pytest.approx(100 * layer, rel=1e-9)


def test_weights_and_kv_are_where_they_are_used() -> None:
    """Pages take what the attention side's weights leave of its GPU; by hand."""
    engine = {"num_pages": None, "memory_fraction": 1.0, "max_num_seqs": 1}
    file = run_file(engine, simulate=PEAK | {"reserve_gb": 0.0})
    attention = 2 * (6 * 16 * 4 * (2 * 4 + 2 * 2) + 2 * 100 * 16)
    page = 6 * 2 * 2 * 4 * 2 * 4
    assert modelled(file).num_pages == [(1_000_000 - attention) // page]
    whole = run_file(
        engine | {"stages": [{"group": "a"}]},
        groups={"a": {"kind": "card"}},
        links=[],
        simulate=PEAK | {"reserve_gb": 0.0},
    )
    ffn = 2 * 6 * 3 * 16 * 16
    assert modelled(whole).num_pages == [(1_000_000 - attention - ffn) // page]


def test_a_group_too_small_for_the_ffn_is_refused() -> None:
    small = CARD | {"memory_gb": 5e-6}
    file = run_file(gpus={"card": CARD, "small": small}, simulate=PEAK)
    file["groups"]["f"] = {"kind": "small"}
    message = r"instances\.x: groups\.f: 1 x 0\.0 GB do not hold an FFN of 0\.00 GB and"
    with pytest.raises(JaxinferError, match=message):
        modelled(file)


def test_costs_other_than_rooflines_are_refused() -> None:
    modelled(run_file(simulate={"groups": {"a": {"step_s": 1.0}}}))
    with pytest.raises(JaxinferError, match=r"simulate\.groups\.f\.step_s: leave it out"):
        modelled(run_file(simulate={"groups": {"f": {"step_s": 1.0}}}))
    for name in "af":
        file = run_file(simulate={"groups": {name: {"linear": {"step_s": 1.0}}}})
        with pytest.raises(JaxinferError, match=rf"the attention of {name} cannot be told from"):
            modelled(file)


def test_a_stage_is_described_with_its_ffn_group() -> None:
    (stage,) = modelled(run_file()).describe_stages()
    assert stage["ffn"] == {"group": "f"}


def test_runs_with_ffn_groups_are_not_replayed(tmp_path: Path) -> None:
    served(run_file(), (5, 3), folder=tmp_path)
    path = tmp_path / "1" / "run.json"
    record = json.loads(path.read_text()) | {"run_file": run_file(), "measured_gb_s": {}}
    path.write_text(json.dumps(record))
    with pytest.raises(JaxinferError, match="instance x has FFN groups, of whose parts"):
        replay(tmp_path / "1", tmp_path / "out")


def test_a_missing_link_is_named() -> None:
    file = run_file(links=[])
    with pytest.raises(JaxinferError, match=r"links: none between a and f, where FFN inputs must"):
        modelled(file)


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_a_run_takes_the_steps_times(micro_batches: int) -> None:
    """Four equal requests, prompts and then decodes: steps are as long as their parts in turn."""
    file = run_file({"micro_batches": micro_batches})
    stage = stage_of(file)
    metrics, times = served(file, *[(2, 4)] * 4)
    (first, *_) = times.values()
    for number, (start, end) in enumerate(pairwise(first)):
        size = 4 // micro_batches
        part = decodes(*[3 + number] * size)
        layers = in_turns(6, [stage.part(part)] * micro_batches, 0.25)
        head = 2 * (16 * 100 + 4 * 116) * 1e-6
        assert end - start == pytest.approx(layers + head, rel=1e-9)
    assert metrics.requests == 4
