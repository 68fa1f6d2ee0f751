"""Efficiencies from points: those that made them come back; what points cannot tell stays."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from jaxinfer import JaxinferError
from jaxinfer.config.costs import SimulateOptions
from jaxinfer.config.run_file import as_run_file
from jaxinfer.hardware.catalogue import find_gpu, find_model
from jaxinfer.lab.validate.calibrate import (
    Calibration,
    MeasuredStep,
    as_yaml,
    calibrate,
    calibrate_group,
    calibration_table,
    read_points,
)
from jaxinfer.serving.batch import Work
from jaxinfer.serving.system import System
from jaxinfer.simulate.costs.roofline import KernelEfficiency, RooflineStage

GPU, MODEL = find_gpu("A10"), find_model("llama-3-8b")
LAYERS = MODEL.num_hidden_layers
TRUTH = KernelEfficiency(flops=0.55, bandwidth=0.8, step_s=0.004, sequence_s=2e-4)
BEFORE = KernelEfficiency(flops=0.9, bandwidth=0.5, step_s=0.0, sequence_s=0.0)
Counts = tuple[int, int, int, float]
LONG = [(chunk, start, 0, 0) for chunk in (512, 1024, 2048) for start in (0, 1024, 4096)]
SHORT = [(chunk, 0, 0, 0) for chunk in (16, 32, 64, 128)]
DECODES = [(0, 0, n, context) for n in (1, 4, 16, 32, 64) for context in (100, 1000, 4000)]
MIXED = [
    (256, start, n, context)
    for start in (0, 2048, 8192)
    for n in (1, 16, 64)
    for context in (200, 3000)
]


def stage(efficiency: KernelEfficiency) -> RooflineStage:
    return RooflineStage(GPU, MODEL, LAYERS, True, 1, 2, efficiency, GPU.link_gb_s)


def point(counts: Counts, seconds: float = 1.0) -> MeasuredStep:
    return MeasuredStep.model_validate(
        dict(zip(MeasuredStep.model_fields, (*counts, seconds), strict=True))
    )


def measured(
    steps: Sequence[Counts], truth: KernelEfficiency = TRUTH, noise: float = 0.0, seed: int = 0
) -> list[MeasuredStep]:
    rng, made = random.Random(seed), stage(truth)
    return [
        point(counts, made.seconds(point(counts).work) * (1 + rng.gauss(0, noise)))
        for counts in steps
    ]


def check(found: Calibration, expected: KernelEfficiency, rel: float, seconds: float = 0.0) -> None:
    """Check values to a share; ``step_s``, a small part of most steps, to some seconds as well."""
    for name in found.fitted:
        room = seconds if name == "step_s" else 0.0
        expected_value = pytest.approx(getattr(expected, name), rel=rel, abs=room)
        assert getattr(found.efficiency, name) == expected_value, name
    for name in set(vars(expected)) - set(found.fitted):
        assert getattr(found.efficiency, name) == pytest.approx(getattr(BEFORE, name))


ALL = ("flops", "bandwidth", "step_s", "sequence_s")
KINDS = [
    (LONG + SHORT + DECODES + MIXED, ALL),
    (DECODES + LONG, ALL),
    (MIXED, ALL),
]


@pytest.mark.parametrize(("steps", "fitted"), KINDS)
def test_what_made_the_points_comes_back(steps: list[Counts], fitted: tuple[str, ...]) -> None:
    found = calibrate(stage, measured(steps), BEFORE)
    assert found.fitted == fitted
    check(found, TRUTH, rel=0.01)
    assert found.mape < 1e-4
    assert found.points == len(steps)


@pytest.mark.parametrize("seed", range(3))
def test_noise_of_two_percent(seed: int) -> None:
    points = measured((LONG + SHORT + DECODES + MIXED) * 2, noise=0.02, seed=seed)
    found = calibrate(stage, points, BEFORE)
    assert found.fitted == ALL
    check(found, TRUTH, rel=0.05, seconds=0.002)
    assert 0.01 < found.mape < 0.03


def engine(**changes: float) -> KernelEfficiency:
    """TRUTH, with nothing of what the points of a test cannot tell."""
    return replace(TRUTH, **changes)


@pytest.mark.parametrize("noise", [0.0, 0.02])
@pytest.mark.parametrize(
    ("steps", "truth", "fitted"),
    [
        # No operator of these is bound by FLOPs, whichever of both they are.
        (DECODES, TRUTH, ("bandwidth", "step_s", "sequence_s")),
        # All but the head, whose time is the same each time.
        (LONG, engine(bandwidth=0.5, step_s=0.03, sequence_s=0), ("flops", "step_s")),
        # With one sequence each, what a sequence costs is a part of what a step does.
        (SHORT + LONG, engine(sequence_s=0), ("flops", "bandwidth", "step_s")),
        (LONG[:1] * 5, engine(bandwidth=0.5, step_s=0, sequence_s=0), ("flops",)),
        (DECODES[:1], engine(step_s=0, sequence_s=0), ("bandwidth",)),
    ],
)
def test_what_points_cannot_tell_is_kept(
    steps: list[Counts], truth: KernelEfficiency, fitted: tuple[str, ...], noise: float
) -> None:
    found = calibrate(stage, measured(steps, truth, noise, seed=1), BEFORE)
    assert found.fitted == fitted
    # What is off by 2 % of a chunk of half a second looks like time of the engine.
    check(found, truth, rel=0.1 if noise else 0.01, seconds=0.5 * noise)
    assert ("step_s" in fitted) or found.efficiency.step_s == 0


def test_chunks_that_wait_for_memory_alone_do_not_tell_how_fast_a_gpu_computes() -> None:
    """A GPU that computes 360 tokens a quarter slower would be seen, a faster one would not."""
    chunks = [(360, start, 0, 0) for start in (0, 8, 16, 24)] * 4
    truth = replace(BEFORE, step_s=0.004, sequence_s=2e-4)
    found = calibrate(stage, measured(DECODES + chunks, truth), BEFORE)
    assert found.fitted == ("bandwidth", "step_s", "sequence_s")
    check(found, truth, rel=0.01)
    slower, faster = (
        stage(replace(truth, flops=truth.flops * by)).seconds(point(chunks[0]).work)
        for by in (0.8, 1.25)
    )
    exact = stage(truth).seconds(point(chunks[0]).work)
    assert slower / exact > 1.05
    assert faster / exact == pytest.approx(1, abs=2e-3)


def test_the_worst_point_is_named() -> None:
    points = measured(LONG + SHORT + DECODES)
    points[3] = points[3].model_copy(update={"seconds": 1.5 * points[3].seconds})
    found = calibrate(stage, points, BEFORE)
    assert found.worst_point == points[3]
    predicted = stage(found.efficiency).seconds(points[3].work)
    assert -0.4 < found.worst < -0.25
    assert found.worst == pytest.approx(predicted / points[3].seconds - 1)
    everywhere = [abs(stage(found.efficiency).seconds(p.work) / p.seconds - 1) for p in points]
    assert found.mape == pytest.approx(sum(everywhere) / len(points))
    assert max(everywhere) == pytest.approx(-found.worst)


def test_a_start_in_the_wrong_valley_is_left() -> None:
    """The minimum downhill from 0.03 of the FLOPs is not the least."""
    truth = KernelEfficiency(flops=0.55, bandwidth=0.39, step_s=0.004, sequence_s=2e-4)
    before = KernelEfficiency(flops=0.0324, bandwidth=0.2357, step_s=0.0, sequence_s=0.0)
    found = calibrate(stage, measured(MIXED, truth), before)
    assert found.fitted == ALL
    check(found, truth, rel=0.01)


def test_no_gpu_is_faster_than_its_peaks() -> None:
    points = measured(LONG + SHORT + DECODES, replace(TRUTH, flops=1.5, bandwidth=1.25))
    found = calibrate(stage, points, BEFORE)
    assert (found.efficiency.flops, found.efficiency.bandwidth) == pytest.approx((1, 1))
    assert found.worst > 0.1


def test_the_table_has_the_points_that_are_furthest_off_first() -> None:
    """25 points of 0.1 s and more, predicted in turns too high and too low, ever further."""
    points = [point((16 + n, n, 2 * n, 100), 0.1 + n / 100) for n in range(25)]
    errors = [(-1) ** n * n / 100 for n in range(25)]
    predicted = [p.seconds * (1 + error) for p, error in zip(points, errors, strict=True)]
    found = Calibration(TRUTH, ("flops", "step_s"), 0.123, -0.24, points[23], 25)
    table = calibration_table(points, found, predicted)
    assert str(table.title) == (
        "mean error of 25 points: 12.3%; not told by them, so left as it was: bandwidth, sequence_s"
    )
    rows = list(zip(*(column.cells for column in table.columns), strict=True))
    assert len(rows) == 20
    assert rows[:2] == [
        ("40", "24", "48", "100", "340.00", "421.60", "+24.0%"),
        ("39", "23", "46", "100", "330.00", "254.10", "-23.0%"),
    ]
    assert [row[-1] for row in rows] == [f"{errors[n]:+.1%}" for n in range(24, 4, -1)]
    told = calibration_table(points, replace(found, fitted=ALL), predicted)
    assert str(told.title) == "mean error of 25 points: 12.3%"


def test_what_is_to_be_pasted_takes_the_place_of_what_was_there() -> None:
    """Four digits; the rest of the section and of the group stays."""
    efficiency = KernelEfficiency(0.123456, 0.654321, 0.0123456, 1.23456e-5)
    found = Calibration(efficiency, ALL, 0.1, 0.2, point((16, 0, 0, 0)), 1)
    values = {"flops": 0.1235, "bandwidth": 0.6543, "step_s": 0.01235, "sequence_s": 1.235e-5}
    groups = {"g": {"reserve_gb": 3, "flops": 0.25}, "h": {"step_s": 0.5}}
    before = as_run_file({"simulate": {"hop_s": 0.5, "groups": groups}}).simulate
    section = yaml.safe_load(as_yaml("g", found, before))["simulate"]
    assert section == {
        "hop_s": 0.5,
        "groups": {"g": {"reserve_gb": 3} | values, "h": {"step_s": 0.5}},
    }
    alone = yaml.safe_load(as_yaml("g", found, SimulateOptions()))["simulate"]
    assert alone == {"groups": {"g": values}}


def test_work_of_a_point() -> None:
    assert point((448, 100, 3, 50)).work == Work(451, 3, 4, 4, 150, [(100, 448)], 3)
    assert point((0, 0, 3, 50.4)).work.single_context == 151
    assert point((2, 100, 1, 5)).work == Work(3, 1, 2, 2, 5, [(100, 2)], 1)
    assert point((1, 100, 2, 5)).work == Work(3, 3, 3, 3, 111, [], 2)
    assert point((0, 0, 2, 51)).work == Work(2, 2, 2, 2, 102, [], 2)
    assert point((1, 100, 0, 0)).work == Work(1, 1, 1, 1, 101, [], 0)


HEADER = "chunk_tokens,chunk_context,decodes,decode_context,seconds\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("chunk_tokens,decodes,seconds\n", "line 1: no column chunk_context, decode_context"),
        ("", "line 1: no column chunk_tokens"),
        (HEADER, "a header and no points"),
        (HEADER + "16,0,0,0,0.1\n16,x,0,0,0.1\n", "line 3: chunk_context is 'x', must be an int"),
        (HEADER + "16,0,0,0,\n", "line 2: seconds is '', must be a number"),
        (HEADER + "16,0,0\n", "line 2: decode_context is '', must be a number"),
        (HEADER + "1.5,0,0,0,0.1\n", "line 2: chunk_tokens is '1.5', must be an integer"),
        (HEADER + "16,-1,0,0,0.1\n", "line 2: chunk_context is '-1', must be greater than or"),
        (HEADER + "16,0,0,0,0\n", "line 2: seconds is '0', must be greater than 0"),
        (HEADER + "16,0,0,0,nan\n", "line 2: seconds is 'nan', must be"),
        (HEADER + "16,0,0,0,9e-8\n", "line 2: seconds is 9e-08: no step takes less than 1e-7"),
        (HEADER + "16,0,0,0,10001\n", "line 2: seconds is '10001', must be less than or equal"),
        (HEADER + f"{10**18},0,0,0,0.1\n", f"chunk_tokens is '{10**18}', must be less than or eq"),
        (HEADER + f"16,{10**18},0,0,0.1\n", f"chunk_context is '{10**18}', must be less than or"),
        (HEADER + f"0,0,{10**18},0,0.1\n", f"decodes is '{10**18}', must be less than or equal"),
        (HEADER + "0,0,1,1e300,0.1\n", "decode_context is '1e300', must be less than or equal to"),
        (HEADER + "16,0,0,0,1e300\n", "line 2: seconds is '1e300', must be less than or equal to"),
        (HEADER + "0,5,0,5,0.1\n", "line 2: an empty step: chunk_tokens and decodes are 0"),
    ],
)
def test_files_that_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "points.csv"
    path.write_text(text)
    with pytest.raises(JaxinferError) as error:
        read_points(path)
    assert str(error.value).startswith(str(path))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_of_a_spreadsheet_is_read(tmp_path: Path) -> None:
    """A mark of the encoding, columns in another order, one more, and blanks are read."""
    path = tmp_path / "points.csv"
    header = "seconds,decode_context,note,decodes,chunk_context,chunk_tokens\n"
    path.write_text("\ufeff" + header + "1e-7, 2.5 ,x,4,0,0\n0.5,0,,0,8,16\n", encoding="utf-8")
    assert read_points(path) == [point((0, 0, 4, 2.5), 1e-7), point((16, 8, 0, 0), 0.5)]


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(JaxinferError, match=r"points\.csv: No such file or directory$"):
        read_points(tmp_path / "points.csv")
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(JaxinferError, match=r"bytes\.csv: .*can't decode"):
        read_points(tmp_path / "bytes.csv")


class Anywhere(System):
    """Serves no request here."""

    def route(self, waiting: Any, cluster: Any) -> Any:
        return ()


RUN = {
    "model": "llama-3-8b",
    "system": f"{__name__}:Anywhere",
    "groups": {"g": {"kind": "A10", "devices": 2}, "h": {"kind": "A10"}},
    "links": [{"between": ["g", "h"], "gb_s": 10.0}],
    "instances": {
        "a": {"group": "g"},
        "b": {"stages": [{"group": "h"}], "launch_ahead": False},
    },
    "simulate": {"flops": 0.9, "bandwidth": 0.5},
}


def write(points: Sequence[MeasuredStep], path: Path) -> Path:
    rows = [",".join(str(value) for value in p.model_dump().values()) for p in points]
    path.write_text(HEADER + "\n".join(rows) + "\n")
    return path


def test_a_group_of_a_run_file(tmp_path: Path) -> None:
    shared = RooflineStage(GPU, MODEL, LAYERS, True, 2, 2, TRUTH, GPU.link_gb_s)
    steps = [point(counts) for counts in LONG + SHORT + DECODES]
    points = [p.model_copy(update={"seconds": shared.seconds(p.work)}) for p in steps]
    path = write(points, tmp_path / "points.csv")
    found, table = calibrate_group(as_run_file(RUN), "g", path)
    check(found, TRUTH, rel=0.01)
    assert found.fitted == ALL
    console = Console(width=120, record=True)
    console.print(table)
    assert "measured (ms)" in console.export_text()
    # What is to be pasted is read again, as these very numbers, in place of those that were there.
    config = as_run_file(RUN | {"simulate": {"groups": {"g": {"flops": 0.9, "reserve_gb": 3}}}})
    run = as_run_file({**RUN, **yaml.safe_load(as_yaml("g", found, config.simulate))})
    assert run.simulate.of("g").reserve_gb == 3
    assert run.simulate.of("g").sequence_s == pytest.approx(2e-4, rel=0.01)
    assert run.simulate.of("g").flops == pytest.approx(0.55, rel=0.01)


def test_a_group_of_a_hardware_file(tmp_path: Path) -> None:
    """The GPU is the node's, whose power cap leaves a part of the peak; so is its own share."""
    nodes = {"n": {"gpu": "A10", "gpus": 1, "nic_gb_s": 1.0, "flops_scale": 0.75}}
    file = tmp_path / "hardware.yaml"
    file.write_text(yaml.safe_dump({"source": "none", "latency_s": 0.0, "nodes": nodes}))
    run = {
        "model": "llama-3-8b",
        "groups": {"g": {}},
        "instances": {"a": {"group": "g"}},
        "simulate": {"hardware": str(file), "groups": {"g": {"node": "n", "bandwidth": 0.5}}},
    }
    capped = GPU.model_copy(update={"bf16_tflops": 0.75 * GPU.bf16_tflops})
    made = RooflineStage(capped, MODEL, LAYERS, True, 1, 2, TRUTH, GPU.link_gb_s)
    points = [point(c, made.seconds(point(c).work)) for c in LONG + SHORT + DECODES]
    found, table = calibrate_group(as_run_file(run), "g", write(points, tmp_path / "points.csv"))
    assert found.fitted == ALL
    check(found, TRUTH, rel=0.01)
    # The table's predictions are of what has been found, not of what was before.
    assert {str(cell) for cell in table.columns[-1].cells} <= {"+0.0%", "-0.0%"}


@pytest.mark.parametrize(
    ("changes", "group", "message"),
    [
        ({}, "gg", "no group 'gg': did you mean 'g'?"),
        ({"simulate": {"tables": "somewhere"}}, "g", "groups.g: its times come from tables"),
        ({"simulate": {"linear": {"step_s": 1}}}, "g", "groups.g: its times come from linear"),
        (
            {"instances": {"b": {"stages": [{"group": "g"}, {"group": "h"}]}}},
            "h",
            "groups.h: no instance of one stage stands on it",
        ),
        ({"instances": {"a": {"group": "g"}}}, "h", "groups.h: no instance stands on it"),
        ({"instances": {}}, "g", "groups and links need instances"),
        ({}, "g", "points.csv: No such file"),
    ],
)
def test_groups_that_are_refused(
    changes: dict[str, Any], group: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(JaxinferError) as error:
        calibrate_group(as_run_file({**RUN, **changes}), group, tmp_path / "points.csv")
    assert message in str(error.value)
