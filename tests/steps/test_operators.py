"""Steps that are made of known parts are taken apart into these."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.config.costs import SimulateOptions
from jaxinfer.config.stage_part import StagePart
from jaxinfer.errors import JaxinferError
from jaxinfer.hardware.catalogue import ModelShape, find_gpu
from jaxinfer.simulate.costs.measured_steps import MeasuredTables, ProgramStage
from jaxinfer.simulate.costs.operator_folder import Degree, check_steps, write_meta, write_run_file
from jaxinfer.steps.operators import Depths, Operators, write_operators
from jaxinfer.steps.shapes import StepLimits
from jaxinfer.steps.times import Part, features, shape_of, work_of_parts

LIMITS = StepLimits(16, 64, 8, 32, (32, 64))
MODEL = ModelShape(
    hidden_size=8,
    intermediate_size=16,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=10,
)
GPU = find_gpu("A10")
HEADS = {rows: 1e-4 * rows for rows in LIMITS.row_buckets}
POINTS: list[tuple[Part, ...]] = [
    *(((context, 1),) * rows for rows in LIMITS.row_buckets for context in (0, 60, 200)),
    *(((start, tokens),) for tokens in (32, 64) for start in (0, 64, 190)),
]
HELD_OUT: list[tuple[Part, ...]] = [((31, 1), (31, 1), (0, 20)), ((100, 1), (96, 40))]


def layer(parts: tuple[Part, ...], pair: float = 2e-8, entry: float = 5e-7) -> float:
    """Seconds of one layer: by its shape, pairs and entries."""
    shape = shape_of(LIMITS, parts)
    _, pairs, entries = features(parts)
    return 1e-4 + 3e-6 * shape.tokens * (2 if shape.chunks else 1) + pair * pairs + entry * entries


def besides(parts: tuple[Part, ...]) -> float:
    """Return the seconds of a step besides layers and head."""
    return 2e-4 + 1e-6 * shape_of(LIMITS, parts).tokens


def seconds(parts: tuple[Part, ...], layers: int) -> float:
    return layers * layer(parts) + besides(parts) + HEADS[shape_of(LIMITS, parts).rows]


def found(depths: tuple[int, int] = (2, 6)) -> Operators:
    points = [Depths(p, seconds(p, depths[0]), seconds(p, depths[1])) for p in POINTS]
    return Operators.split(LIMITS, points, depths, HEADS)


def degree(devices: int = 1, over_devices: bool = True) -> Degree:
    options = {
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
        "token_buckets": [32, 64],
        "page_size": 32,
        "max_model_len": 256,
        "num_pages": 65,
        "launch_ahead": True,
    }
    checks = {parts: seconds(parts, 6) for parts in HELD_OUT}
    return Degree(devices, MODEL, options, LIMITS, over_devices, (1e-3, 0.0), 6, checks, 0.01)


def written(folder: Path, *degrees: Degree) -> Path:
    for each in degrees:
        write_operators(folder / f"tp{each.devices}", found())
    write_meta(folder, "A10", degrees, {})
    return folder


def stage(
    folder: Path, devices: int = 1, layers: int = 6, last: bool = True, limits: StepLimits = LIMITS
) -> ProgramStage:
    part = StagePart(GPU, "A10", MODEL, layers, 1.0, True, last, devices, 2, 2, limits)
    opened = MeasuredTables.of(part, SimulateOptions(tables=str(folder)))
    assert isinstance(opened, ProgramStage)
    return opened


def test_layers_attention_and_the_rest_are_found_again() -> None:
    operators = found()
    for shape, micros in operators.layers.items():
        factor = 2 if shape.chunks else 1
        assert micros == pytest.approx(1e-4 + 3e-6 * shape.tokens * factor, rel=1e-6)
        assert operators.steps[shape] == pytest.approx(2e-4 + 1e-6 * shape.tokens, rel=1e-6)
    assert operators.heads == HEADS
    for parts, point in zip(POINTS, operators.attention, strict=True):
        _, pairs, entries = features(parts)
        assert point.seconds == pytest.approx(2e-8 * pairs + 5e-7 * entries, rel=1e-4, abs=1e-9)


def test_depths_do_not_matter_where_layers_are_alike() -> None:
    a, b = found((1, 3)), found((2, 6))
    for shape in a.layers:
        assert a.layers[shape] == pytest.approx(b.layers[shape], rel=1e-6)


def test_the_tables_give_the_steps_back(tmp_path: Path) -> None:
    whole = stage(written(tmp_path, degree()))
    for parts in POINTS:
        assert whole.seconds(work_of_parts(parts)) == pytest.approx(seconds(parts, 6), rel=1e-4)
    # Steps are padded: 33 tokens take what 64 do but for what they attend to.
    more = whole.seconds(work_of_parts([(0, 33)])), whole.seconds(work_of_parts([(0, 32)]))
    assert more[0] - more[1] == pytest.approx(6 * 32 * 6e-6 + 32e-6, rel=0.1)
    half = stage(tmp_path, layers=3, last=False)
    work = work_of_parts([(0, 64)])
    expected = 3 * layer(((0, 64),)) + besides(((0, 64),))
    assert half.seconds(work) == pytest.approx(expected, rel=1e-4)


@given(
    contexts=st.lists(st.integers(0, 250), max_size=16),
    chunks=st.lists(st.tuples(st.integers(0, 200), st.integers(2, 20)), max_size=2),
)
def test_any_step_is_the_sum_of_its_parts(
    tmp_path_factory: pytest.TempPathFactory, contexts: list[int], chunks: list[Part]
) -> None:
    parts = (*((context, 1) for context in contexts), *chunks)
    if not parts:
        return
    folder = tmp_path_factory.getbasetemp() / "operators"
    whole = stage(folder if folder.exists() else written(folder, degree()))
    assert whole.seconds(work_of_parts(parts)) == pytest.approx(seconds(parts, 6), rel=0.03)


def test_steps_that_no_table_is_made_of_are_checked(tmp_path: Path) -> None:
    checks = list(check_steps(written(tmp_path, degree()), "A10", GPU, degree()))
    assert [check.kind for check in checks] == [
        "32 tokens, with decodes",
        "64 tokens, with decodes",
    ]
    assert all(check.adds_up and abs(check.middle) < 0.02 for check in checks)
    slow = degree()
    late = Degree(**{**vars(slow), "checks": {p: 1.2 * s for p, s in slow.checks.items()}})
    for check in check_steps(tmp_path, "A10", GPU, late):
        assert check.middle == pytest.approx(1 / 1.2 - 1, abs=0.02)
        assert not check.adds_up


def test_all_reduces_are_modelled_where_one_device_was_measured(tmp_path: Path) -> None:
    alone, over = (
        written(tmp_path / "a", degree(2, False)),
        written(tmp_path / "b", degree(2, True)),
    )
    work = work_of_parts([(0, 64)])
    gb_s, each_s = GPU.collective
    # Two per layer; a ring of two sends half of the bytes twice.
    expected = 12 * each_s + 12 * 64 * 8 * 2 / (gb_s * 1e9)
    both = stage(alone, devices=2).seconds(work), stage(over, devices=2).seconds(work)
    assert both[0] - both[1] == pytest.approx(expected)


def test_an_engine_that_pads_otherwise_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path, degree())
    other = StepLimits(16, 128, 8, 32, (32, 128))
    with pytest.raises(JaxinferError, match=r"token_buckets are \[32, 64\], the instance's .* 128"):
        stage(folder, limits=other)
    with pytest.raises(JaxinferError, match=r"row_buckets are \[4, 16\], the instance's .* to 8"):
        stage(folder, limits=StepLimits(32, 64, 8, 32, (32, 64)))
    with pytest.raises(JaxinferError, match="no such folder; tp1 was profiled"):
        stage(folder, devices=2)


def test_a_table_that_lacks_a_size_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, degree()) / "tp1" / "dense.csv"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(line for line in lines if not line.startswith("decode_layer,16")))
    with pytest.raises(JaxinferError, match="decode_layer lacks steps that are padded to 16"):
        stage(tmp_path)


def test_the_run_file_is_simulated_as_it_is(tmp_path: Path) -> None:
    from jaxinfer.config.run_file import load_run_file
    from jaxinfer.simulate.run import simulate
    from jaxinfer.workload.lengths import BenchRequest

    path = write_run_file(written(tmp_path, degree()), "m", "A10", None, degree())
    run = simulate(load_run_file(str(path), []), [BenchRequest(None, 32, 3, 0.0)])
    steps = [((0, 32),), ((32, 1),), ((33, 1),)]
    assert run.wall_s == pytest.approx(sum(seconds(parts, 6) for parts in steps), rel=0.01)


def test_what_one_decode_sees() -> None:
    """Rows of attention have means: of one row, its own; of three, theirs."""
    shape = StepLimits(4, 64, 8, 16)
    points = [Depths(parts, 1.0, 2.0) for parts in (((9, 1),), ((9, 1), (19, 1), (31, 1)))]
    rows = {s.rows: 0.1 for s in shape.shapes()}
    found = Operators.split(shape, points, (1, 2), rows).attention
    assert [(p.decodes, p.context) for p in found] == [(1, 10), (3, 62 / 3)]
