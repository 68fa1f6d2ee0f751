"""Replays of runs that were never run: folders and profiles made up, figures by hand."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jaxinfer import JaxinferError
from jaxinfer.config.costs import SimulateOptions
from jaxinfer.config.resolve import Resolved
from jaxinfer.lab.validate import replay as module
from jaxinfer.lab.validate.replay import fidelity, furthest_apart, replay
from jaxinfer.report.records import RequestRecord, RunRecord, TransferRecord
from jaxinfer.serving.step_fit import StepFit
from jaxinfer.simulate.cluster import ModelledCluster
from jaxinfer.simulate.stage_path import StagePath
from jaxinfer.steps import profile as stored
from jaxinfer.steps.profile import Profile, store_profile
from jaxinfer.steps.times import Part, StepPoint
from jaxinfer.workload.lengths import BenchRequest

# Two rows, or chunks up to 16 or 64 tokens.
ENGINE = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 64,
    "token_buckets": [16, 64],
    "page_size": 8,
    "launch_ahead": False,
    "enable_prefix_caching": False,
}
# A step's seconds: 0.01 of decodes and 1 ms for each entry; of chunks 0.05 or 0.1, and 10 us for
# each pair.
STEPS: tuple[tuple[Part, ...], ...] = (
    ((9, 1),),
    ((19, 1),),
    ((0, 16),),
    ((64, 16),),
    ((0, 64),),
    ((64, 64),),
)


def seconds(parts: Sequence[Part]) -> float:
    ((start, count),) = parts
    if count == 1:
        return 0.01 + (start + 1) * 1e-3
    return (0.1 if count > 16 else 0.05) + 1e-5 * count * (start + (count + 1) / 2)


def profile(name: str, *shares: float) -> str:
    """Store a profile whose stages take these shares of a step; return the name of its file."""
    prefills = [(n, tuple(share * n for share in shares)) for n in (10, 20)]
    mixed = [
        (p, d, tuple(share * (1 + p / 10 + d / 100) for share in shares))
        for p in (0, 10)
        for d in (0, 100)
    ]
    points = [
        StepPoint(parts, tuple(share * seconds(parts) for share in shares)) for parts in STEPS
    ]
    return store_profile(Profile({"name": name}, prefills, mixed, points)).stem


@pytest.fixture(autouse=True)
def _own_profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "FOLDER", tmp_path / "profiles")


def stages(*given: tuple[str, int], dtype: str = "float32") -> list[dict[str, object]]:
    return [
        {"group": group, "layers": layers, "num_pages": 33 + layers, "dtype": dtype}
        for group, layers in given
    ]


def described(profile: str, stages: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Hidden states of 4 numbers, KV of 2 heads of 8."""
    return {
        "stages": stages,
        "profile": profile,
        "max_model_len": 200,
        "hidden_size": 4,
        "kv_heads": [2, 8],
    }


Request = tuple[str, float, int, int]  # Id, arrival, tokens of its prompt and of its output.


def write(
    folder: Path,
    run_file: Mapping[str, Any],
    instances: Mapping[str, Mapping[str, object]],
    requests: Sequence[Request] = (("r0", 0.0, 64, 1),),
    gb_s: Mapping[str, float] = {},
    **more: Any,
) -> Path:
    folder.mkdir()
    engine = {name: {**ENGINE, **config} for name, config in run_file["instances"].items()}
    metrics = {"wall_s": 9.0, "failed": 0, "cached_tokens": 0}
    run = {
        "status": "finished",
        "system": {"name": "single"},
        "metrics": metrics,
        "emulated": [],
        "run_file": {**run_file, "instances": engine},
        "instances": instances,
        "lost": {},
        "measured_gb_s": gb_s,
    }
    (folder / "run.json").write_text(json.dumps(run | more))
    (folder / "steps.jsonl").write_text("")
    lines = [
        {"id": name, "arrival": arrival, "prompt_len": prompt, "cut": 0, "preemptions": 0,
         "error": None, "token_times": [arrival + 1.0 + n for n in range(output)]}
        for name, arrival, prompt, output in requests
    ]  # fmt: skip
    (folder / "requests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


SLOW = {"emulate": {"slowdown": 2.0}}


def single(folder: Path, requests: Sequence[Request], **more: Any) -> Path:
    """An instance at half the speed of its profile; ``simulate`` is of another cluster."""
    run_file = {
        "model": "m",
        "groups": {"g": SLOW},
        "instances": {"a": {"group": "g"}},
        "simulate": {"hardware": "nowhere.yaml", "hop_s": 9.0},
    }
    instances = {"a": described(profile("a", 1.0), stages(("g", 3)))}
    return write(folder, run_file, instances, requests, **more)


def test_steps_take_what_the_profile_says_as_often_as_emulated(tmp_path: Path) -> None:
    """Requests of one moment by their numbers; the last one's chunks are of 64 and 16 tokens."""
    given = [("r1", 10.0, 80, 1), ("r10-2", 0.0, 64, 2), ("r9-3", 0.0, 64, 1)]
    real, found = replay(single(tmp_path / "run", given), tmp_path / "out")
    assert (real.name, found.name) == ("real", "simulated")
    assert [request.id for request in real.requests] == ["r1", "r10-2", "r9-3"]
    times = {request.id: request.token_times for request in found.requests}
    full, decode = 2 * (0.1 + 0.0208), 2 * (0.01 + 0.065)
    rest = 2 * (0.05 + 1e-5 * 16 * (64 + 8.5))
    assert times == {
        "0": pytest.approx([full]),
        "1": pytest.approx([2 * full, 2 * full + decode]),
        "2": pytest.approx([10 + full + rest]),
    }
    assert [request.prompt_len for request in found.requests] == [64, 64, 80]
    again, _ = replay(tmp_path / "run", tmp_path / "out")
    assert again == real
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["1", "2"]


@pytest.mark.parametrize("link", [True, False])
def test_hidden_states_go_over_the_emulated_link_in_their_bucket(
    link: bool, tmp_path: Path
) -> None:
    """A token has 16 bytes: 64 take a second, 2 decodes 1 / 32; latency is half a second."""
    links = [{"between": ["h", "g"], "gb_s": 1.024e-6, "latency_s": 0.5}] if link else []
    run_file = {
        "model": "m",
        "groups": {"g": {}, "h": SLOW},
        "links": links,
        "instances": {"x": {"stages": [{"group": "g"}, {"group": "h"}]}},
        "system": {"name": "pipeline_parallel"},
    }
    instances = {"x": described(profile("x", 0.25, 0.75), stages(("g", 1), ("h", 2)))}
    _, found = replay(
        write(tmp_path / "run", run_file, instances, [("r0", 0.0, 63, 2)]), tmp_path / "out"
    )
    # 63 tokens go in the bucket of 64, one goes in that of 2.
    chunk, decode = 0.1 + 1e-5 * 63 * 32, 0.01 + 0.064
    hops = (1.5, 0.5 + 2 / 64) if link else (0.0, 0.0)
    at = 0.0
    for step, total, hop in zip(found.steps, (chunk, decode), hops, strict=True):
        first, second = (at, at + total / 4), (at + total / 4 + hop, at + 1.75 * total + hop)
        assert step.stages == (pytest.approx(first, abs=2e-6), pytest.approx(second, abs=2e-6))
        at = second[1]


def test_segments_of_a_stage_take_turns_on_its_devices(tmp_path: Path) -> None:
    """Two steps in flight: the second one's first piece waits for the first one's last."""
    config = {"group": "g", "segments": 2, "launch_ahead": True}
    run_file = {"model": "m", "groups": {"g": {}}, "instances": {"a": config}}
    instances = {"a": described(profile("a", 0.25, 0.75), stages(("g", 1), ("g", 2)))}
    given = [("r0", 0.0, 64, 1), ("r1", 0.0, 64, 1)]
    _, found = replay(write(tmp_path / "run", run_file, instances, given), tmp_path / "out")
    full = 0.1208
    for step, at in zip(found.steps, (0.0, full), strict=True):
        first, second = (at, at + full / 4), (at + full / 4, at + full)
        assert step.stages == (pytest.approx(first, abs=2e-6), pytest.approx(second, abs=2e-6))


@dataclass
class Served:
    """The parts of a simulated replay."""

    site: Resolved
    cluster: ModelledCluster
    fits: Mapping[str, StepFit]
    work: Sequence[BenchRequest]


class _EnoughError(Exception):
    pass


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Served]:
    found: list[Served] = []

    def note(cluster: Any, work: Any, out: object) -> None:
        found.append(Served(cluster.resolved, cluster, cluster.fits, work))
        raise _EnoughError

    monkeypatch.setattr(module, "serve", note)
    return found


@pytest.mark.parametrize("linked", [True, False])
def test_kv_goes_as_it_did(linked: bool, tmp_path: Path, served: list[Served]) -> None:
    """KV goes from stages of 1 and 2 layers to one, in the fewer of 64 and 128 bytes a layer.

    Over an emulated link it goes at the link's speed, over others at that of the probe.
    """
    links = [{"between": ["h", "d"], "gb_s": 0.5, "latency_s": 0.25}] if linked else []
    run_file = {
        "model": "m",
        "groups": {"g": SLOW, "h": {}, "d": {}},
        "links": links,
        "instances": {"x": {"stages": [{"group": "g"}, {"group": "h"}]}, "y": {"group": "d"}},
        "system": {"name": "disaggregated", "prefill": "x", "decode": "y"},
    }
    instances = {
        "x": described(profile("x", 1.0, 3.0), stages(("g", 1), ("h", 2))),
        "y": described(profile("y", 5.0), stages(("d", 3), dtype="bfloat16")),
    }
    rates = {"x -> y": 7.0, "y -> x": 8.0}
    given = [("r0", 0.5, 64, 3), ("r1", 0.0, 20, 1)]
    folder = write(tmp_path / "run", run_file, instances, given, rates)
    with pytest.raises(_EnoughError):
        replay(folder, tmp_path / "out")
    (found,) = served
    assert found.site.run_file.simulate == SimulateOptions()
    assert found.work == [BenchRequest(None, 20, 1, 0.0), BenchRequest(None, 64, 3, 0.5)]
    late, fast = (0.25, 0.5e9) if linked else (0.0, 7e9)
    back = 0.5e9 if linked else 8e9
    assert found.cluster.lanes == {
        ("x", "y"): [
            StagePath(0, 64, (("g", "d"),), 0.0),
            StagePath(1, 128, (("h", "d"),), late),
        ],
        ("y", "x"): [
            StagePath(0, 64, (("d", "g"),), 0.0),
            StagePath(0, 128, (("d", "h"),), late),
        ],
    }
    assert found.cluster.capacities == {
        ("g", "d"): 7e9,
        ("h", "d"): fast,
        ("d", "g"): 8e9,
        ("d", "h"): back,
    }
    x, y = found.cluster.instances["x"], found.cluster.instances["y"]
    assert (x.groups, x.layers, x.num_pages) == (["g", "h"], [1, 2], [34, 35])
    assert (y.groups, y.layers, y.num_pages) == (["d"], [3], [36])
    assert (x.token_bytes, y.token_bytes) == (128, 64)
    assert (x.segments, y.segments) == (1, 1)
    assert (list(x.devices), list(y.devices)) == ([0, 1], [0])
    assert x.config == found.site.instances["x"]
    # The Balancer went by the slowed device: 2 x 1 + 3 of each, and 5.
    for name in "xy":
        fit = found.fits[name]
        assert (fit.prefill.per_token, fit.prefill.constant) == pytest.approx((5, 0), abs=1e-9)
        assert fit.mixed.seconds(100, 1000) == pytest.approx(5 * 21)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"lost": {"a": "gone"}}, "the run lost an instance, or requests of it failed"),
        ({"metrics": {"failed": 1, "cached_tokens": 0}}, "or requests of it failed"),
        ({"metrics": {"failed": 0, "cached_tokens": 8}}, "used its prefix cache, whose hits are"),
        ({"status": "running"}, "the run is 'running', must be finished"),
    ],
)
def test_runs_that_cannot_be_replayed(more: dict[str, Any], message: str, tmp_path: Path) -> None:
    if "metrics" in more:
        more["metrics"]["wall_s"] = 9.0
    folder = single(tmp_path / "run", [("r0", 0.0, 64, 1)], **more)
    with pytest.raises(JaxinferError) as error:
        replay(folder, tmp_path / "out")
    assert str(error.value).startswith(f"{folder}: ")
    assert message in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_replay_or_a_run_without_its_profile_is_refused(tmp_path: Path) -> None:
    folder = single(tmp_path / "run", [("r0", 0.0, 64, 1)])
    replay(folder, tmp_path / "out")
    with pytest.raises(JaxinferError, match=r"1: not a real run, or one of an older version$"):
        replay(tmp_path / "out" / "1", tmp_path / "again")
    for path in (tmp_path / "profiles").iterdir():
        path.unlink()
    with pytest.raises(JaxinferError, match=r"/run: instance a: no profile "):
        replay(folder, tmp_path / "again")


def run(times: Sequence[Sequence[float]], wall_s: float = 10.0, **more: Any) -> RunRecord:
    requests = tuple(
        RequestRecord(str(number), 0.0, 10, tuple(at), 0, number, None)
        for number, at in enumerate(times)
    )
    return RunRecord("x", wall_s, {}, (), (), more.get("transfers", ()), requests, {})


def test_how_far_output_tokens_are_apart() -> None:
    """Tokens so far, of 4: at 2 the one has 3 and the other 1."""
    one, other = run([(1, 2), (2, 8)]), run([(2, 8), (3, 9)])
    assert furthest_apart(one, other) == furthest_apart(other, one) == 2 / 4
    assert furthest_apart(one, one) == 0
    # Of the real run's tokens, of which there are 2 here, and one more at 1.
    assert furthest_apart(run([(1, 5)]), run([(1, 1, 5, 5)])) == 2 / 2


def test_figures_side_by_side() -> None:
    """Rows tell how much more the simulated run has, as a share of the real one."""
    moved = TransferRecord("0", "a", "b", 10, 1000, 0.0, 0.0, 1.0, 0.0)
    real = run([(1, 2, 4), (2, 4)], wall_s=8.0, transfers=(moved,))
    simulated = run([(1.5, 2, 4), (1.5, 5)], wall_s=10.0, transfers=(moved, moved))
    table = fidelity(real, simulated)
    assert [str(column.header) for column in table.columns] == [
        "",
        "real",
        "simulated",
        "difference",
    ]
    rows = list(zip(*(column.cells for column in table.columns), strict=True))
    assert rows == [
        ("makespan (s)", "8.00", "10.0", "+25.0%"),
        ("TTFT P50 (s)", "1.50", "1.50", "+0.0%"),
        ("TTFT P99 (s)", "1.99", "1.50", "-24.6%"),
        ("TBT P50 (s)", "2.00", "2.00", "+0.0%"),
        ("TBT P99 (s)", "2.00", "3.47", "+73.5%"),
        ("KV moved (bytes)", "1,000", "2,000", "+100.0%"),
        ("preemptions", "1.00", "1.00", "+0.0%"),
        ("output tokens over time, furthest apart", "", "", "20.0%"),
    ]
    alone = fidelity(run([(1.0,)]), run([(1.0,)]))
    rows = list(zip(*(column.cells for column in alone.columns), strict=True))
    assert rows[3:7] == [
        ("TBT P50 (s)", "-", "-", "-"),
        ("TBT P99 (s)", "-", "-", "-"),
        ("KV moved (bytes)", "0.00", "0.00", "-"),
        ("preemptions", "0.00", "0.00", "-"),
    ]
