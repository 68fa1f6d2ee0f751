"""The serving loop in virtual time: closed forms, invariants, refusals."""

import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from jaxinfer import JaxinferError
from jaxinfer.config.run_file import RunFile, load_run_file
from jaxinfer.report.records import RunRecord, read_lines, read_run
from jaxinfer.serving.request_state import RequestState
from jaxinfer.simulate.run import simulate
from jaxinfer.systems.single import Single
from jaxinfer.workload.lengths import BenchRequest

CRONUS = Path(__file__).parents[2] / "configs" / "cronus"
SYSTEMS = sorted(path.stem for path in CRONUS.glob("*.yaml"))


def run(config: RunFile, work: list[BenchRequest], folder: Path) -> RunRecord:
    simulate(config, work, folder)
    newest = max(folder.iterdir(), key=lambda path: int(path.name))
    return read_run(newest)


def lengths(seed: int, count: int, rate: float) -> list[BenchRequest]:
    rng, now, work = random.Random(seed), 0.0, []
    for _ in range(count):
        work.append(BenchRequest(None, rng.randint(1, 3000), rng.randint(1, 400), now))
        now += rng.expovariate(rate)
    return work


SINGLE = {
    "model": "llama-3-8b",
    "engine": {
        "max_num_seqs": 1,
        "max_num_batched_tokens": 4096,
        "launch_ahead": False,
        "enable_prefix_caching": False,
        "max_model_len": 4096,
    },
    "groups": {"g": {"kind": "A100-80G-SXM"}},
    "instances": {"i": {"group": "g"}},
}


def config(folder: Path, **changes: Any) -> RunFile:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(SINGLE | changes))
    return load_run_file(path)


def test_one_prefill_at_a_time_is_an_m_d_1_queue(tmp_path: Path) -> None:
    """DistServe's eq. 1: the mean TTFT is D + R D^2 / (2 (1 - R D))."""
    setup = config(tmp_path)

    def ttfts(work: list[BenchRequest]) -> list[float]:
        found: dict[str, float] = {}

        def note(request: RequestState, times: Sequence[float]) -> None:
            found[request.id] = times[0] - request.arrival

        simulate(setup, work, on_request=note)
        return [found[str(number)] for number in range(len(work))]

    (d,) = ttfts([BenchRequest(None, 512, 1, 0.0)])
    rate, count = 0.6 / d, 60_000
    rng, now, work = random.Random(3), 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        work.append(BenchRequest(None, 512, 1, now))
    # Lindley's recursion on the very arrivals is exact; eq. 1 is the mean over all.
    waited, expected = 0.0, [d]
    for before, after in pairwise(work):
        waited = max(waited + d - (after.arrival - before.arrival), 0.0)
        expected.append(waited + d)
    assert fmean(expected) == pytest.approx(d + rate * d**2 / (2 * (1 - rate * d)), rel=0.02)
    assert ttfts(work[:4000]) == pytest.approx(expected[:4000], abs=1e-9)


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_same_again_bit_for_bit(system: str, tmp_path: Path) -> None:
    setup = load_run_file(CRONUS / f"{system}.yaml")
    work = lengths(1, 60, rate=5.0)
    files = []
    for _ in range(2):
        simulate(setup, work, tmp_path)
        newest = max(tmp_path.iterdir(), key=lambda path: int(path.name))
        files.append([(newest / name).read_bytes() for name in ("steps.jsonl", "requests.jsonl")])
    assert files[0] == files[1]


@examples(10)
@given(seed=st.integers(0, 10**6), rate=st.sampled_from((0.5, 3.0, 1000.0)))
@pytest.mark.parametrize("system", SYSTEMS)
def test_everyone_is_served_and_steps_do_not_overlap(
    system: str, seed: int, rate: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    work = lengths(seed, 25, rate)
    setup = load_run_file(CRONUS / f"{system}.yaml")
    found = run(setup, work, tmp_path_factory.mktemp("run"))
    by_id = {request.id: request for request in found.requests}
    for number, item in enumerate(work):
        times = by_id[str(number)].token_times
        assert len(times) == item.max_tokens
        assert item.arrival < times[0]
        assert list(times) == sorted(times)
    for instance, groups in found.groups.items():
        steps = [step for step in found.steps if step.instance == instance]
        for stage in range(len(groups)):
            spans = [step.stages[stage] for step in steps]
            assert all(a[1] <= b[0] + 2e-6 for a, b in pairwise(spans))
    for transfer in found.transfers:
        assert transfer.requested <= transfer.start <= transfer.end


@pytest.mark.parametrize("system", ["data_parallel", "single"])
def test_nobody_idles_who_has_work(system: str, tmp_path: Path) -> None:
    """Steps follow each other without a gap if all requests are there at the start."""
    setup = config(tmp_path)
    if system == "data_parallel":
        setup = load_run_file(CRONUS / "data_parallel.yaml")
    found = run(setup, [BenchRequest(None, 700, 50, 0.0)] * 40, tmp_path / "runs")
    for instance in found.groups:
        spans = [step.stages[0] for step in found.steps if step.instance == instance]
        assert len(spans) > 20
        assert all(b[0] - a[1] < 2e-6 for a, b in pairwise(spans))


@pytest.mark.parametrize(("chunks", "first"), [("all", 4), (1, 6)])
def test_chunks_of_a_prompt_in_a_pipeline(chunks: str | int, first: int, tmp_path: Path) -> None:
    """Three chunks through two stages of a second each: with 1 in flight, six seconds."""
    setup = config(
        tmp_path,
        engine=SINGLE["engine"]
        | {"max_num_batched_tokens": 100, "chunks_in_flight": chunks, "max_num_seqs": 2},
        groups={"g": {"kind": "A100-80G-SXM", "devices": 2, "tensor_parallel_size": 1}},
        instances={"i": {"stages": [{"group": "g", "layers": 16}] * 2}},
        simulate={"linear": {"step_s": 1.0}},
    )
    alone = run(setup, [BenchRequest(None, 300, 2, 0.0)], tmp_path / "alone")
    ends = pytest.approx((first, first + 2), abs=1e-3)  # Hidden states take microseconds.
    assert alone.requests[0].token_times == ends
    # Another prompt's chunks fill what waiting leaves.
    both = run(setup, [BenchRequest(None, 300, 1, 0.0)] * 2, tmp_path / "both")
    assert both.wall_s == pytest.approx(7, abs=1e-3)


def test_kv_takes_its_bytes_over_the_link(tmp_path: Path) -> None:
    setup = load_run_file(CRONUS / "disaggregated_low_high.yaml")
    found = run(setup, [BenchRequest(None, 1000, 5, 0.0)], tmp_path)
    (transfer,) = found.transfers
    assert transfer.num_bytes == 1000 * 131072
    assert transfer.end - transfer.start == pytest.approx(131072e3 / 12.5e9 + 1e-5, abs=2e-6)


def test_segments_leave_while_the_next_ones_are_computed(tmp_path: Path) -> None:
    path = CRONUS / "disaggregated_low_high.yaml"
    ends = {}
    for rule, segments in (("at_end", 1), ("per_segment", 1), ("per_segment", 8)):
        changes = [f"system.hand_off={rule}", f"instances.prefill.segments={segments}"]
        setup = load_run_file(path, changes)
        found = run(setup, [BenchRequest(None, 1000, 5, 0.0)], tmp_path / f"{rule}-{segments}")
        (transfer,), step = found.transfers, found.steps[0]
        assert transfer.num_bytes == 1000 * 131072
        ends[rule, segments] = transfer.end - step.stages[0][1]
    alone = 131072e3 / 12.5e9 + 1e-5
    assert ends["at_end", 1] == ends["per_segment", 1] == pytest.approx(alone, abs=2e-6)
    # The last of eight pieces is all that is left after the step.
    assert ends["per_segment", 8] == pytest.approx((alone - 1e-5) / 8 + 1e-5, abs=2e-6)


@pytest.mark.parametrize(
    ("system", "changes", "message"),
    [
        ("cronus", ["links=[]"], "links: none between low and high, where KV must go"),
        ("pipeline_parallel", ["links=[]"], "links: none between high and low, where hidden"),
        (
            "cronus",
            ["groups.low.kind=T4"],
            "instances.ppi: groups.low: 14.5 of 16.1 GB hold 16.06 GB",
        ),
        (
            "cronus",
            ["simulate.reserve_gb=500"],
            "85.9 GB hold 16.06 GB of weights, 500.00 GB kept by reserve_gb, and 0 KV pages",
        ),
        (
            "cronus",
            ["instances.cpi.num_pages=1000000"],
            "16.06 GB of weights, 0.18 GB kept for activations, and",
        ),
        ("cronus", ["groups.low.kind=A11"], "groups.low.kind: no GPU 'A11'"),
        ("cronus", ["groups.low.kind="], "groups.low.kind is missing, must name the GPU that is"),
        ("cronus", ["model=llama-9b"], "model 'llama-9b': no folder with config.json"),
        ("cronus", ["simulate.flops=1.5"], "simulate.flops is 1.5"),
        ("cronus", ["simulate.groups.weak.flops=1.0"], "simulate.groups.weak: no such group"),
        ("cronus", ["instances.cpi.num_pages=1000000"], "not 1000000"),
    ],
)
def test_what_cannot_be_is_refused(
    system: str, changes: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(JaxinferError) as error:
        simulate(load_run_file(CRONUS / f"{system}.yaml", changes), lengths(0, 3, 1.0))
    assert message in str(error.value)


def test_two_instances_of_one_group_have_its_link_between_them(tmp_path: Path) -> None:
    groups = {"g": {"kind": "A10", "devices": 2, "tensor_parallel_size": 1}}
    engine = SINGLE["engine"] | {"max_num_seqs": 4}
    system = {"name": "disaggregated", "prefill": "a", "decode": "b"}
    setup = config(
        tmp_path,
        groups=groups,
        engine=engine,
        system=system,
        instances={name: {"group": "g"} for name in "ab"},
    )
    found = run(setup, [BenchRequest(None, 1000, 5, 0.0)], tmp_path / "runs")
    (transfer,) = found.transfers
    assert transfer.end - transfer.start == pytest.approx(131072e3 / 32e9, abs=2e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["groups.g.platform=cpu"], "groups.g: a modelled group is a GPU"),
        (["instances.i.dtype=float32"], "dtype is float32"),
        (["groups.g.devices=12"], "groups.g: 12 devices do not divide the model's 32 heads"),
        (
            ["groups.g.devices=16", "simulate.groups.g.curves={file: nowhere}"],
            "groups.g: 16 devices do not divide the model's 8 heads",
        ),
        (["instances.i.segments=33"], "segments is 33, a stage has 32 layers"),
        (["instances.i.max_model_len=100"], "request 0: "),
        (["simulate.tables=nowhere"], "instances.i: simulate.tables: nowhere: no such folder"),
        (
            ["simulate.groups.g.curves={file: nowhere}"],
            "instances.i: simulate.groups.g.curves: nowhere: No such file",
        ),
    ],
)
def test_options_that_do_not_apply_are_refused(
    changes: list[str], message: str, tmp_path: Path
) -> None:
    config(tmp_path)
    with pytest.raises(JaxinferError) as error:
        simulate(load_run_file(tmp_path / "run.yaml", changes), [BenchRequest(None, 99, 2, 0.0)])
    assert message in str(error.value)


def test_more_devices_than_kv_heads_have_copies_of_them(tmp_path: Path) -> None:
    """As a real run's have, whose default is megatron: 16 devices with 8 KV heads."""
    config(tmp_path)
    changes = ["groups.g.devices=16"], ["groups.g.devices=16", "instances.i.layout=megatron"]
    work = [BenchRequest(None, 99, 20, 0.0)]
    implied, asked = (
        simulate(load_run_file(tmp_path / "run.yaml", each), work) for each in changes
    )
    assert (implied.tpot_p50, implied.num_pages) == (asked.tpot_p50, asked.num_pages)
    few = simulate(load_run_file(tmp_path / "run.yaml", ["groups.g.devices=8"]), work)
    assert few.tpot_p50 != asked.tpot_p50


class Odd:
    def __repr__(self) -> str:
        return "an Odd"


REPORTS: list[tuple[Any, Any, str | None]] = [
    (3, {}, "Single.report returns 3, must be a mapping"),
    (
        {"n": np.int64(7), "x": [np.float32(0.5)], 4: {"at": np.arange(2)}, "seen": {2, 1}},
        {"n": 7, "x": [0.5], "4": {"at": [0, 1]}, "seen": [1, 2]},
        None,
    ),
    (
        {"kept": 1, "a": {"b": Odd()}},
        {"kept": 1, "a": {"b": "an Odd"}},
        "Single.report returns what JSON cannot hold: a.b is an Odd",
    ),
]


@pytest.mark.parametrize(("report", "written", "wrong"), REPORTS)
def test_no_report_takes_the_results_with_it(
    report: Any,
    written: Any,
    wrong: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Single, "report", lambda self: report)
    run(config(tmp_path), [BenchRequest(None, 10, 2, 0.0)], tmp_path / "runs")
    found = read_lines(tmp_path / "runs" / "1")
    assert found.run["system_report"] == written
    assert found.run.get("system_report_error") == wrong
    assert (len(found.requests), found.run["metrics"]["requests"]) == (1, 1)
    path = tmp_path / "runs" / "1" / "run.json"
    assert capsys.readouterr().err == (f"jaxinfer: {path}: {wrong}\n" if wrong else "")


@pytest.mark.parametrize("error", [ZeroDivisionError("once"), SystemExit(3)])
def test_a_report_that_fails(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Single) -> None:
        raise error

    monkeypatch.setattr(Single, "report", fail)
    run(config(tmp_path), [BenchRequest(None, 10, 2, 0.0)], tmp_path / "runs")
    found = read_lines(tmp_path / "runs" / "1").run
    assert found["system_report"] == {}
    kind = type(error).__name__
    assert found["system_report_error"].startswith(f"Single.report raises {kind}: {error}")
