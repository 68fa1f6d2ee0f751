"""Hints beside a replay of a run whose emulated devices were late."""

from jaxinfer.lab.validate.replay import overruns
from jaxinfer.report.records import RunRecord


def test_late_devices_are_named() -> None:
    """Devices late by over a hundredth of the run's ten seconds."""
    late = {
        "a": {"steps": 12, "seconds": 3.25},
        "b": {"steps": 5, "seconds": 0.05},
        "c": {"steps": 0, "seconds": 0.0},
    }
    (hint,) = overruns(RunRecord("real", 10.0, {}, (), (), (), (), {"overruns": late}))
    assert hint.startswith("a: 12 steps overran the emulated device, by 3.25 s in all: ")
    assert "larger slowdown" in hint


def test_a_hundredth_of_the_run_is_no_matter() -> None:
    late = {name: {"steps": 1, "seconds": seconds} for name, seconds in (("a", 0.1), ("b", 0.11))}
    (hint,) = overruns(RunRecord("real", 10.0, {}, (), (), (), (), {"overruns": late}))
    assert hint.startswith("b: 1 steps overran the emulated device, by 0.11 s in all: ")
