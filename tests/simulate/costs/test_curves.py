"""Curves of whole steps: points, between and beyond them, mixed steps, what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer import JaxinferError
from jaxinfer.config.resolve import resolve
from jaxinfer.config.run_file import as_run_file
from jaxinfer.config.site import model_site
from jaxinfer.report.table import beyond_measured
from jaxinfer.serving.batch import Work
from jaxinfer.simulate.cluster import model_cluster
from jaxinfer.simulate.costs.curves import BatchCurves, CurveCosts, CurveStage
from jaxinfer.simulate.costs.piecewise_linear import PiecewiseLinear
from jaxinfer.simulate.run import simulate
from jaxinfer.workload.bench_request import BenchRequest

HEAD = "phase,tokens,batch,context,seconds"
# Splitwise's perf_model.csv, BLOOM-176B on eight A100, medians in milliseconds, to three digits: a
# prompt by its tokens, and decodes of one prompt of 512 by tokens of prompt and batch.
PROMPTS = {128: 79.7, 256: 99.2, 512: 173.8, 1024: 289.2, 2048: 540.4, 4096: 1348.2, 8192: 3593.2}
DECODES = {128: 47.6, 256: 47.7, 512: 48.8, 1024: 49.3, 2048: 50.2}


def write(path: Path, *lines: str) -> str:
    path.write_text("\n".join([HEAD, *lines]) + "\n")
    return str(path)


def splitwise(path: Path) -> str:
    return write(
        path,
        *(f"prompt,{x},,,{y / 1e3}" for x, y in PROMPTS.items()),
        *(f"decode,{x},,,{y / 1e3}" for x, y in DECODES.items()),
    )


def prompts(*lengths: int, rows: int = 0, entries: int = 0) -> Work:
    """Whole ones in one step, beside decodes."""
    n = len(lengths)
    chunks = [(0, length) for length in lengths]
    return Work(sum(lengths) + rows, rows, n + rows, n + rows, entries, chunks, rows)


def decodes(rows: int, entries: int) -> Work:
    return Work(rows, rows, rows, rows, entries, [], rows)


def stage(file: str, share: float = 1.0, **options: Any) -> CurveStage:
    return CurveStage(CurveCosts(file=file, **options), share)


def test_by_tokens(tmp_path: Path) -> None:
    """Times hold at points, halfway, below the first (along two), and where batching is free."""
    found = stage(splitwise(tmp_path / "x.csv"), decode="by_tokens", mixed_factor=1.1)
    for tokens, millis in PROMPTS.items():
        assert found.seconds(prompts(tokens)) == pytest.approx(millis / 1e3)
    assert found.seconds(prompts(256, 512)) == pytest.approx((173.8 + 289.2) / 2e3)
    assert found.seconds(prompts(64)) == pytest.approx((79.7 - 19.5 / 2) / 1e3)
    # From half of the last point on: 4096 to 8192.
    assert found.seconds(prompts(10_000)) == pytest.approx((3593.2 + 1808 * 2245 / 4096) / 1e3)
    for rows in (1, 64):
        expected = 47.6 - 0.1 * (128 - rows) / 128
        assert found.seconds(decodes(rows, 99_999)) == pytest.approx(expected / 1e3)


def test_a_spreadsheet_s_mark_is_passed_over(tmp_path: Path) -> None:
    path = Path(splitwise(tmp_path / "x.csv"))
    path.write_text(path.read_text(), encoding="utf-8-sig")
    assert stage(str(path), decode="by_tokens").seconds(prompts(512)) == pytest.approx(0.1738)


def test_a_mixed_step(tmp_path: Path) -> None:
    """1.1 times a prompt of all tokens, or what each phase takes alone; one alone as it is."""
    file = splitwise(tmp_path / "x.csv")
    work = prompts(1000, rows=24, entries=5000)
    times = stage(file, decode="by_tokens", mixed_factor=1.1)
    assert times.seconds(work) == pytest.approx(1.1 * 0.2892)
    assert times.seconds(prompts(1024)) == pytest.approx(0.2892)
    assert times.seconds(decodes(128, 1)) == pytest.approx(0.0476)
    added = stage(file, decode="by_tokens")
    alone = added.seconds(prompts(1000)) + added.seconds(decodes(24, 5000))
    assert added.seconds(work) == pytest.approx(alone)
    assert alone > 0.33


def test_prompts_and_decodes_that_share_the_weights(tmp_path: Path) -> None:
    """Decodes beside prompts take what they take beyond a single one at the least context."""
    lines = ("prompt,1000,,,0.3", "decode,,1,100,0.05", "decode,,1,200,0.051", "decode,,9,100,0.09")
    times = stage(write(tmp_path / "x.csv", *lines), share_weights=True)
    # Nine rows take 0.04 s more than one, and an entry beyond 100 takes 10 us.
    for context, more in ((100, 0.04), (120, 0.04 + 9 * 20 * 1e-5)):
        assert times.seconds(decodes(9, 9 * context)) == pytest.approx(0.05 + more)
        work = prompts(1000, rows=9, entries=9 * context)
        assert times.seconds(work) == pytest.approx(0.3 + more)
    assert times.seconds(prompts(1000)) == pytest.approx(0.3)
    # With less context than was measured, nothing is won.
    assert times.seconds(prompts(1000, rows=1, entries=50)) == pytest.approx(0.3)


def test_stages_share_a_step(tmp_path: Path) -> None:
    file = splitwise(tmp_path / "x.csv")
    for work in (prompts(700), decodes(5, 100), prompts(300, rows=3, entries=50)):
        for factor in (None, 1.3):
            whole = stage(file, decode="by_tokens", mixed_factor=factor)
            part = stage(file, 0.3, decode="by_tokens", mixed_factor=factor)
            assert part.seconds(work) == pytest.approx(0.3 * whole.seconds(work))


def plane(batch: float, context: float) -> float:
    """Linear in rows and entries, as a decode's time is (Aladdin's eq. 3)."""
    return 0.05 + 0.0007 * batch + 2.5e-7 * batch * context


GRID = {(b, c): plane(b, c) for b in (1, 4, 16, 64) for c in (100, 1000, 4000)}
CROSS = {at: seconds for at, seconds in GRID.items() if at[0] == 1 or at[1] == 1000}


@given(st.integers(1, 300), st.integers(1, 20_000), st.sampled_from([GRID, CROSS]))
def test_a_plane_is_met_everywhere(
    rows: int, context: int, points: dict[tuple[float, float], float]
) -> None:
    """A plane is met by a grid, and by a line of contexts and one of batches, also beyond both."""
    found = BatchCurves(points)(rows, rows * context)
    assert found == pytest.approx(plane(rows, context), rel=1e-9)


def test_points_are_met_whatever_lies_between() -> None:
    points = {at: seconds * (1 + 0.1 * (i % 3)) for i, (at, seconds) in enumerate(GRID.items())}
    curves = BatchCurves(points)
    for (batch, context), seconds in points.items():
        assert curves(batch, batch * context) == pytest.approx(seconds)
    # Halfway between batches at one context, and between contexts of one batch.
    between = (points[16, 1000] + points[64, 1000]) / 2
    assert curves(40, 40 * 1000) == pytest.approx(between)
    assert curves(16, 16 * 2500) == pytest.approx((points[16, 1000] + points[16, 4000]) / 2)


def test_a_batch_of_one_context_grows_as_the_nearest_of_several() -> None:
    """Batch 8 is nearer to 2, 10 to 16, whose slopes differ; 9 goes by the lesser slope."""
    points = {(2.0, 100.0): 1.0, (2.0, 200.0): 1.2, (16.0, 100.0): 2.0, (16.0, 200.0): 5.2}
    points |= {(8.0, 100.0): 1.5, (9.0, 100.0): 1.6, (10.0, 100.0): 1.7}
    curves = BatchCurves(points)
    assert curves(8, 8 * 150) == pytest.approx(1.5 + 400 * 0.2 / 200)
    assert curves(9, 9 * 150) == pytest.approx(1.6 + 450 * 0.2 / 200)
    assert curves(10, 10 * 150) == pytest.approx(1.7 + 500 * 3.2 / 1600)


def test_a_steep_rise_does_not_go_below_zero() -> None:
    """0.2 s a row: six rows of 100 entries would take 0.2 s, one row -0.8 s."""
    curves = BatchCurves({(10, 100): 1.0, (10, 200): 1.5, (20, 100): 3.0, (20, 200): 3.5})
    assert curves(6, 600) == pytest.approx(0.2)
    assert curves(1, 100) == 0


points = st.dictionaries(
    st.tuples(st.integers(1, 64), st.integers(1, 2000)), st.floats(1e-6, 1.0), min_size=2
)


@given(points, st.integers(1, 10_000), st.integers(1, 10_000))
def test_beyond_the_last_point_more_work_takes_no_less(
    points: dict[tuple[float, float], float], rows: int, context: int
) -> None:
    """However noisy the points are."""
    line = PiecewiseLinear({batch: seconds for (batch, _), seconds in points.items()})
    last = line.x[-1]
    assert line(last + rows + 1) >= line(last + rows) >= line(last) - 1e-9
    try:
        curves = BatchCurves(points)
    except JaxinferError:
        return  # No batch has several contexts.
    most = max(batch for batch, _ in points)
    assert curves(most + rows, (most + rows) * context) >= curves(most, most * context) * (1 - 1e-9)


def test_decodes_that_are_flat_but_for_noise_stay_so(tmp_path: Path) -> None:
    """A curve of memory-bound decodes that fell by 0.7 % was at 0 from 1,160 rows on."""
    lines = ("prompt,128,,,0.02", "prompt,1024,,,0.1")
    lines += tuple(f"decode,{x},,,{y}" for x, y in ((1, 0.01), (8, 0.01005), (16, 0.00998)))
    found = stage(write(tmp_path / "x.csv", *lines), decode="by_tokens")
    for rows in (16, 256, 1160, 100_000):
        assert found.seconds(decodes(rows, rows)) == pytest.approx(0.00998)


def test_a_run_says_how_far_beyond_the_points_it_went(tmp_path: Path) -> None:
    lines = ("prompt,128,,,0.02", "prompt,1024,,,0.1", "decode,1,,,0.01", "decode,16,,,0.012")
    file = write(tmp_path / "x.csv", *lines)
    config = as_run_file(
        {
            "model": "llama-3-8b",
            "engine": {"max_num_batched_tokens": 2048, "max_num_seqs": 64, "max_model_len": 2048},
            "groups": {"g": {"kind": "A100-80G-SXM"}},
            "instances": {"i": {"group": "g"}},
            "simulate": {"curves": {"file": file, "decode": "by_tokens"}},
        }
    )
    far = simulate(config, [BenchRequest(None, 100, 5, 0.0)] * 40)
    # 20 prompts of 100 tokens in the first step, then 20 decodes beside the others.
    assert far.beyond == {"i": {"prompt tokens": (2048, 1024), "decodes": (40, 16)}}
    assert beyond_measured(far.beyond) == (
        "warning: some steps are larger than any measured one; their times are extrapolated: "
        "i: 2,048 prompt tokens (measured up to 1,024); i: 40 decodes (measured up to 16)"
    )
    near = simulate(config, [BenchRequest(None, 100, 5, 0.0)] * 8)
    assert near.beyond == {}
    assert beyond_measured(near.beyond) is None


def test_by_batch_and_context_from_a_file(tmp_path: Path) -> None:
    """Splitwise's decodes at batch 1 to 64, with its slope over one prompt's length: at batch 32
    and 4,096 entries each, what the batch takes, and 32 rows' more entries."""
    batches = {1: 48.8, 2: 50.0, 8: 53.0, 32: 65.4, 64: 96.6}
    lines = [f"decode,,{b},576,{y / 1e3}" for b, y in batches.items()]
    lines += ["decode,,1,4160,0.0502", "prompt,100,,,1.5", "prompt,100,,,0.5"]
    found = stage(write(tmp_path / "x.csv", *lines))
    slope = (50.2 - 48.8) / (4160 - 576)
    for rows, millis in batches.items():
        assert found.seconds(decodes(rows, rows * 576)) == pytest.approx(millis / 1e3)
    expected = 65.4 + slope * 32 * (4096 - 576)
    assert found.seconds(decodes(32, 32 * 4096)) == pytest.approx(expected / 1e3)
    # The mean of a point that is there twice, whatever its length; and the sum.
    work = prompts(7000, rows=32, entries=32 * 576)
    assert found.seconds(work) == pytest.approx(1.0 + 0.0654)
    assert found.read == {
        "file": str(tmp_path / "x.csv"),
        "prompt_tokens": [100, 100],
        "decode": {"batch": [1, 64], "context": [576, 4160]},
    }


def test_a_cluster_of_curves(tmp_path: Path) -> None:
    file = splitwise(tmp_path / "x.csv")
    config = as_run_file(
        {
            "model": "llama-3-8b",
            "groups": {"a": {"kind": "A100-80G-SXM"}, "b": {"kind": "A10"}},
            "instances": {
                "i": {"stages": [{"group": "a", "layers": 24}, {"group": "b", "layers": 8}]}
            },
            "links": [{"between": ["a", "b"], "gb_s": 10}],
            "simulate": {"curves": {"file": file, "decode": "by_tokens"}},
        }
    )
    instance = model_cluster(model_site(replace(resolve(config), pairs=()))).instances["i"]
    assert instance.cost.stages(prompts(512)) == pytest.approx([0.1738 * 0.75, 0.1738 * 0.25])
    assert [tables and tables["file"] for tables in instance.tables] == [file, file]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["prompt,1,,,1"], "has no points of phase decode"),
        (["decode,,1,1,1"], "has no points of phase prompt"),
        (["prefill,1,,,1"], "line 2: phase is 'prefill', not prompt or decode"),
        (["prompt,1,,,1", "decode,1,,,1"], "line 3: batch, context and seconds of a decode must"),
        (["prompt,,1,1,1"], "line 2: tokens and seconds of a prompt must be numbers greater"),
        (["prompt,0,,,1"], "line 2: tokens and seconds of a prompt must be numbers greater than 0"),
        (["prompt,1,,,0"], "line 2: tokens and seconds of a prompt must be numbers greater than 0"),
        (["prompt,1,,,nan"], "line 2: tokens and seconds of a prompt must be numbers greater"),
        (["prompt,1,,,inf"], "line 2: tokens and seconds of a prompt must be numbers greater"),
        (["prompt,1"], "line 2: tokens and seconds of a prompt must be numbers greater than 0"),
        (
            ["prompt,1,,,1", "decode,,1,1,1", "decode,,2,1,1"],
            "no batch was measured at several contexts: give it some, or decode: by_tokens",
        ),
    ],
)
def test_wrong_points_are_named(lines: list[str], message: str, tmp_path: Path) -> None:
    file = write(tmp_path / "x.csv", *lines)
    with pytest.raises(JaxinferError) as error:
        stage(file)
    assert str(error.value).startswith(file)
    assert message in str(error.value)


def test_wrong_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(JaxinferError, match=r"none\.csv: No such file"):
        stage(str(tmp_path / "none.csv"))
    file = tmp_path / "x.csv"
    file.write_text("phase,tokens\nprompt,1\n")
    with pytest.raises(JaxinferError, match=r"x\.csv: lacks the column seconds"):
        stage(str(file))
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(JaxinferError, match=r"x\.csv: "):
        stage(str(file))


def test_options_that_cannot_be_are_refused() -> None:
    for options, message in (
        ({}, "file is missing"),
        ({"file": "x", "decode": "by_batch"}, "decode is 'by_batch', must"),
        ({"file": "x", "mixed_factor": 0.0}, "mixed_factor is 0.0, must be greater than 0"),
        ({"file": "x", "mixed_factor": 1.1, "share_weights": True}, "both mixed_factor and share"),
    ):
        with pytest.raises(JaxinferError) as error:
            CurveCosts.model_validate(options)
        assert message in str(error.value)
