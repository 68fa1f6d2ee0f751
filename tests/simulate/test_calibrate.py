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
from jaxinfer.config import as_run_file
from jaxinfer.serving.work import Work
from jaxinfer.simulate.calibrate import (
    Calibration,
    Point,
    as_yaml,
    calibrate,
    calibrate_group,
    calibration_table,
    read_points,
)
from jaxinfer.simulate.hardware import find_gpu, find_model
from jaxinfer.simulate.roofline import Efficiency, RooflineStage

GPU, MODEL = find_gpu("A10"), find_model("llama-3-8b")
LAYERS = MODEL.num_hidden_layers
TRUTH = Efficiency(flops=0.55, bandwidth=0.8, step_s=0.004, sequence_s=2e-4)
BEFORE = Efficiency(flops=0.9, bandwidth=0.5, step_s=0.0, sequence_s=0.0)
Counts = tuple[int, int, int, int]
LONG = [(chunk, start, 0, 0) for chunk in (512, 1024, 2048) for start in (0, 1024, 4096)]
SHORT = [(chunk, 0, 0, 0) for chunk in (16, 32, 64, 128)]
DECODES = [(0, 0, n, context) for n in (1, 4, 16, 32, 64) for context in (100, 1000, 4000)]
MIXED = [
    (256, start, n, context)
    for start in (0, 2048, 8192) for n in (1, 16, 64) for context in (200, 3000)
]  # fmt: skip


def stage(efficiency: Efficiency) -> RooflineStage:
    return RooflineStage(GPU, MODEL, LAYERS, True, 1, 2, efficiency, GPU.link_gb_s)


def point(counts: Counts, seconds: float = 1.0) -> Point:
    return Point.model_validate(dict(zip(Point.model_fields, (*counts, seconds), strict=True)))


def measured(
    steps: Sequence[Counts], truth: Efficiency = TRUTH, noise: float = 0.0, seed: int = 0
) -> list[Point]:
    rng, made = random.Random(seed), stage(truth)
    return [
        point(counts, made.seconds(point(counts).work) * (1 + rng.gauss(0, noise)))
        for counts in steps
    ]


def check(found: Calibration, expected: Efficiency, rel: float, seconds: float = 0.0) -> None:
    """To a share; ``step_s``, which is a small part of most steps, to some seconds as well."""
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


def engine(**changes: float) -> Efficiency:
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
    steps: list[Counts], truth: Efficiency, fitted: tuple[str, ...], noise: float
) -> None:
    found = calibrate(stage, measured(steps, truth, noise, seed=1), BEFORE)
    assert found.fitted == fitted
    # What is off by 2 % of a chunk of half a second looks like time of the engine.
    check(found, truth, rel=0.1 if noise else 0.01, seconds=0.5 * noise)
    assert ("step_s" in fitted) or found.efficiency.step_s == 0


def test_the_worst_point_is_named() -> None:
    points = measured(LONG + SHORT + DECODES)
    points[3] = points[3].model_copy(update={"seconds": 1.5 * points[3].seconds})
    found = calibrate(stage, points, BEFORE)
    assert found.worst_point == points[3]
    assert -0.4 < found.worst < -0.25
    table = calibration_table(points, found, [p.seconds for p in points])
    assert table.row_count == 20
    assert f"mean error of {len(points)} points" in str(table.title)


def test_work_of_a_point() -> None:
    assert point((448, 100, 3, 50)).work == Work(451, 3, 4, 4, 150, [(100, 448)], 3)
    assert point((0, 0, 2, 51)).work == Work(2, 2, 2, 2, 102, [], 2)
    assert point((1, 100, 0, 0)).work == Work(1, 1, 1, 1, 101, [], 0)


HEADER = "chunk_tokens,chunk_context,decodes,decode_context,seconds\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("chunk_tokens,decodes,seconds\n", "line 1: no column chunk_context, decode_context"),
        ("", "line 1: no column chunk_tokens"),
        (HEADER, "a header and no points"),
        (HEADER + "16,0,0,0,0.1\n16,x,0,0,0.1\n", "line 3: chunk_context is 'x', must be integer"),
        (HEADER + "16,0,0,0,\n", "line 2: seconds is '', must be number"),
        (HEADER + "16,0,0\n", "line 2: decode_context is '', must be number"),
        (HEADER + "1.5,0,0,0,0.1\n", "line 2: chunk_tokens is '1.5', must be integer"),
        (HEADER + "16,-1,0,0,0.1\n", "line 2: chunk_context is '-1', must be greater than or"),
        (HEADER + "16,0,0,0,0\n", "line 2: seconds is '0', must be greater than 0"),
        (HEADER + "16,0,0,0,nan\n", "line 2: seconds is 'nan', must be"),
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


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(JaxinferError, match=r"points\.csv: No such file or directory$"):
        read_points(tmp_path / "points.csv")
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(JaxinferError, match=r"bytes\.csv: .*can't decode"):
        read_points(tmp_path / "bytes.csv")


RUN = {
    "model": "llama-3-8b",
    "groups": {"g": {"kind": "A10", "devices": 2}, "h": {"kind": "A10"}},
    "links": [{"between": ["g", "h"], "gb_s": 10.0}],
    "instances": {
        "a": {"group": "g"},
        "b": {"stages": [{"group": "h"}], "launch_ahead": False},
    },
    "simulate": {"flops": 0.9, "bandwidth": 0.5},
}


def write(points: Sequence[Point], path: Path) -> Path:
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
    # What is to be pasted is read again, as these very numbers.
    before = as_run_file({"simulate": {"hop_s": 0.5, "groups": {"g": {"reserve_gb": 3}}}}).simulate
    run = as_run_file({**RUN, **yaml.safe_load(as_yaml("g", found, before))})
    assert run.simulate.hop_s == 0.5
    assert run.simulate.of("g").reserve_gb == 3
    assert run.simulate.of("g").sequence_s == pytest.approx(2e-4, rel=0.01)
    assert run.simulate.of("g").flops == pytest.approx(0.55, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "group", "message"),
    [
        ({}, "gg", "no group 'gg': did you mean 'g'?"),
        ({"simulate": {"tables": "somewhere"}}, "g", "groups.g: its times come from tables"),
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
