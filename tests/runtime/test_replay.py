"""A real run on emulated devices, and its replay in virtual time."""

from pathlib import Path
from typing import Any

import pytest
from failure_cases import INSTANCE, PARAMS, PROMPTS

from jaxinfer import LLM, JaxinferError
from jaxinfer.config.cluster import InstanceConfig, LinkConfig
from jaxinfer.config.groups import Emulate, GroupConfig
from jaxinfer.config.run_file import RunFile
from jaxinfer.lab.validate.replay import fidelity, furthest_apart, replay
from jaxinfer.report.records import RunRecord
from jaxinfer.report.summary import figures
from jaxinfer.steps import profile as stored

SYSTEMS: dict[str, dict[str, Any]] = {
    "single": {"name": "single"},
    "pipeline_parallel": {"name": "pipeline_parallel"},
    "disaggregated": {"name": "disaggregated", "prefill": "a", "decode": "b"},
    "cronus": {"name": "cronus", "partial": "a", "chunked": "b"},
}


@pytest.fixture
def own_profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(stored, "FOLDER", tmp_path / "profiles")
    return tmp_path / "profiles"


def config(folder: Path, system: str) -> RunFile:
    """Devices so slow that what the host does beside is nothing."""
    slow = GroupConfig(emulate=Emulate(slowdown=60.0))
    options = INSTANCE | {"enable_prefix_caching": False}
    instances = {name: InstanceConfig(group=name, **options) for name in "ab"}
    if system == "single":
        instances = {"a": instances["a"]}
    if system == "pipeline_parallel":
        stages = [{"group": name, "layers": 1} for name in "ab"]
        instances = {"x": InstanceConfig(stages=stages, **options)}  # type: ignore[arg-type]
    groups = {"a": slow} if system == "single" else {"a": slow, "b": slow}
    links = () if system == "single" else (LinkConfig(between=("a", "b"), gb_s=0.001),)
    return RunFile(
        model=str(folder), groups=groups, instances=instances, links=links, system=SYSTEMS[system]
    )


def busy(run: RunRecord) -> float:
    """Return the seconds of all steps, less those by which a busy machine has been late."""
    late = sum(float(each["seconds"]) for each in run.run.get("overruns", {}).values())
    return sum(end - start for step in run.steps for start, end in step.stages) - late


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_replay_is_like_the_run(
    system: str, tiny_folder: Path, tmp_path: Path, own_profiles: Path
) -> None:
    llm = LLM.from_config(config(tiny_folder, system), progress=False)
    llm.generate(PROMPTS, PARAMS, progress=False, run_dir=tmp_path / "runs")
    real, simulated = replay(tmp_path / "runs" / "1", tmp_path / "replays")
    assert [len(r.token_times) for r in sorted(simulated.requests, key=lambda r: r.id)] == [
        len(r.token_times) for r in sorted(real.requests, key=lambda r: r.id)
    ]
    ours, theirs = figures(simulated), figures(real)
    # The same work in the same groups of steps, as far as host time does not decide, which comes
    # on top: by how much is the machine's to say.
    assert busy(simulated) == pytest.approx(busy(real), rel=0.25)
    assert ours.num_bytes == pytest.approx(theirs.num_bytes, rel=0.25)
    assert ours.wall_s < 1.25 * theirs.wall_s
    # Its own figures differ from themselves by nothing.
    assert furthest_apart(real, real) == 0
    assert fidelity(real, simulated).row_count == 8


def test_what_cannot_be_replayed(tiny_folder: Path, tmp_path: Path, own_profiles: Path) -> None:
    llm = LLM.from_config(config(tiny_folder, "single"), progress=False)
    llm.generate(PROMPTS, PARAMS, progress=False, run_dir=tmp_path / "runs")
    replay(tmp_path / "runs" / "1", tmp_path / "replays")
    with pytest.raises(JaxinferError, match="not a real run"):
        replay(tmp_path / "replays" / "1", tmp_path / "again")
    for path in [*own_profiles.iterdir(), *(tmp_path / "runs" / "1").glob("?" * 20 + ".json")]:
        path.unlink()
    with pytest.raises(JaxinferError, match=r"instance a: no profile .*\.json, by which its run"):
        replay(tmp_path / "runs" / "1", tmp_path / "again")
