"""What is said beside a replay of a run whose emulated devices were late."""

from jaxinfer.report.records import RunRecord
from jaxinfer.simulate.replay import overruns


def test_late_devices_are_named() -> None:
    late = {
        "a": {"steps": 12, "seconds": 3.25},
        "b": {"steps": 5, "seconds": 0.05},
        "c": {"steps": 0, "seconds": 0.0},
    }
    (hint,) = overruns(RunRecord("real", 10.0, {}, (), (), (), (), {"overruns": late}))
    assert hint.startswith("a: 12 steps overran the emulated device, by 3.25 s in all: ")
    assert "larger slowdown" in hint
