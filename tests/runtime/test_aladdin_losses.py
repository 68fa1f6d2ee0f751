"""Aladdin loses a worker in a run: its requests come back, and are placed on who was off."""

import os
import signal
from pathlib import Path

import pytest
from cluster_cases import free_executables, load, set_system
from cluster_checks import Done
from process_cases import SMALL, apart, pid_of, serve_until

from jaxinfer.serving.step_fit import DecodeFit, MixedFit, PrefillFit, StepFit

FIT = StepFit(PrefillFit(1e-4, 0.01), MixedFit(0.0, 0.0, 0.01), DecodeFit(1e-5, 1e-4, 0.001))


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(step, marks=pytest.mark.slow if step == 8 else pytest.mark.long)
        for step in (1, 8, 20)
    ],
)
def test_a_worker_that_is_killed(
    step: int, models: dict[str, Path], expected: dict[str, list[Done]], tmp_path: Path
) -> None:
    """Loose targets have all on the first; the other opens once it is lost, and serves all."""
    sections = apart(SMALL, "least_loaded")
    sections["instances"]["b"]["role"] = "off"
    llm = load(models["two"], tmp_path, **sections)
    llm._runs.fits = {"a": FIT, "b": FIT}
    system = {"name": "aladdin", "ttft_s": 600.0, "atgt_s": 60.0, "heartbeat_s": 0.01}
    set_system(llm, system)
    pid = pid_of(llm, "a")
    found, run = serve_until(llm, step, lambda: os.kill(pid, signal.SIGKILL), tmp_path / "run")
    assert found == expected["two"]
    assert list(run["lost"]) == ["a"]
    roles = run["metrics"]["instances"]["b"]
    assert roles["first_step"] is not None
    assert run["system_report"]["moved"] == 0
    del llm
    free_executables()
