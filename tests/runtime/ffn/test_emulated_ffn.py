"""FFN groups and their stages at emulated speeds: when pieces end, tokens, and what is refused."""

import time
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from cluster_cases import Loader, load
from cluster_checks import Done
from ffn_cases import sections
from process_cases import serve_once

from jaxinfer.errors import JaxinferError
from jaxinfer.runtime.ffn.emulated_ffn import EmulatedGroup, PartSeconds
from jaxinfer.runtime.ffn.ffn_stage import FfnStage
from jaxinfer.serving.batch import Batch, Work
from jaxinfer.serving.world import StepDone
from jaxinfer.simulate.ffn import PartTimes, in_turns
from jaxinfer.steps import profile as stored


class Clock:
    """A time that passes only as somebody sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(time, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += seconds


def test_pieces_follow_one_another_and_late_ones_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, group = Clock(monkeypatch), EmulatedGroup()
    assert group.end_of(100, 2) == clock.now == 102
    # Its inputs were there before the group was free, and those of the next one later.
    assert group.end_of(101, 3) == clock.now == 105
    assert group.end_of(106, 1) == clock.now == 107
    clock.now = 110.5  # Computing has taken longer than the emulated device would have.
    assert group.end_of(107, 2) == 110.5
    assert group.late == [1.5]
    assert group.end_of(107, 2) == clock.now == 112.5


class Times:
    """Steps of four layers take 40 s for each of their tokens, without the FFN."""

    def seconds(self, work: Work) -> float:
        return 40.0 * work.tokens


def test_a_part_takes_its_measured_time_as_often_as_it_is_slowed_down() -> None:
    seconds = PartSeconds(Times(), {8: 7.0}, 4, (3.0, 5.0))  # type: ignore[arg-type]
    assert seconds.of_attention(Work(2, 2, 2, 2, 9, [], 2)) == 3 * 40 * 2 / 4
    assert seconds.of_ffn(8) == 5 * 7


def slowed(own: float, ffn: float, micro_batches: int) -> dict[str, Any]:
    given = sections(micro_batches=micro_batches)
    for name, slowdown in (("p", own), ("f", ffn)):
        given["groups"][name] |= {"emulate": {"slowdown": slowdown}}
    return given


@pytest.mark.parametrize(
    "micro_batches",
    [
        pytest.param(2, marks=pytest.mark.slow),
        *(pytest.param(n, marks=pytest.mark.long) for n in (1, 4)),
    ],
)
def test_no_step_ends_before_the_emulated_groups_could_have(
    micro_batches: int,
    loader: Loader,
    expected: dict[str, list[Done]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """By the simulator's recurrence, from the parts' seconds; and tokens are the same."""
    monkeypatch.setattr(stored, "FOLDER", tmp_path / "profiles")
    llm = loader.load("two", **slowed(2, 3, micro_batches))
    (stage,) = llm.cluster.engines["x"].stages
    assert isinstance(stage, FfnStage)
    assert stage.emulated
    seconds = stage.emulated.seconds
    assert seconds.slowdowns == (2, 3)
    assert {*seconds.ffn} == {shape.tokens for shape in stage.step.limits.shapes()}
    assert min(seconds.ffn.values()) > 0

    def least(batch: Batch) -> float:
        parts = []
        for work in batch.work.halves or [batch.work]:
            shape = stage.step.limits.smallest(work.singles, work.tokens, work.sampled)
            ffn = seconds.of_ffn(shape.tokens)
            parts.append(PartTimes(seconds.of_attention(work), ffn, 0.0))
        assert len(parts) == min(micro_batches, len(batch.rows))
        return in_turns(len(stage.layers), parts)

    steps: list[StepDone] = []
    found, _ = serve_once(llm, tmp_path / "runs", steps.append)
    assert found == expected["two"]
    # A step is launched once the groups have ended the one before, which may be reported later.
    bounds = list(accumulate(least(step.batch) for step in steps))
    assert len(steps) > 20
    assert bounds[0] > 0
    took = [step.end - steps[0].start for step in steps]
    assert all(seconds >= bound - 1e-9 for seconds, bound in zip(took, bounds, strict=True))


def test_a_system_with_fits_of_step_times_is_refused(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(stored, "FOLDER", tmp_path / "profiles")
    given = slowed(2, 2, 2)
    given["groups"]["d"] = {}
    given["instances"]["y"] = given["instances"]["x"] | {"stages": [{"group": "d"}]}
    given["instances"]["y"].pop("micro_batches")
    given["system"] = {"name": "cronus", "partial": "y", "chunked": "x"}
    with pytest.raises(JaxinferError, match=r"instances\.x: its system goes by fits of step times"):
        load(models["two"], tmp_path, **given)
