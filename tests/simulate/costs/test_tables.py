"""Operator tables: curves, sums over a step, collectives, what is refused."""

import gzip
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxinfer import JaxinferError
from jaxinfer.config.costs import SimulateOptions
from jaxinfer.config.stage_part import StagePart
from jaxinfer.hardware.catalogue import Gpu, ModelShape, find_gpu
from jaxinfer.serving.batch import Work
from jaxinfer.simulate.costs.measured_steps import MeasuredTables
from jaxinfer.simulate.costs.piecewise_linear import PiecewiseLinear, add_up
from jaxinfer.simulate.costs.tables import TableStage

MODEL = ModelShape(
    hidden_size=8,
    intermediate_size=16,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=10,
)
SIZES = {"intermediate_size": 16, "num_attention_heads": 4, "num_hidden_layers": 1}
LAYER = {
    "layernorm": 2,
    "qkv_proj": 1,
    "rotary_emb": 1,
    "o_proj": 1,
    "gate_up_proj": 1,
    "act_fn": 1,
    "down_proj": 1,
}
# Microseconds per token, so that each operator's count tells in the sum.
DENSE = {name: 10.0**-place for place, name in enumerate([*LAYER, "embedding", "final_layernorm"])}
HEADS, LAUNCH = {"lm_head": 1000.0, "sampler": 7.0}, 50.0
PCIE = Gpu(bf16_tflops=100, memory_gb=24, memory_gb_s=1000, link="PCIe5", link_gb_s=64, watts=300)
# Two chunks of 16 and 20 after 40 and 10 entries, and 4 decodes that see 70 on average.
WORK = Work(40, 4, 6, 5, 280, [(40, 16), (10, 20)])
PAIRS = 16 * (40 + 8) + 20 * (10 + 10)


def attention(c: float, p: float, n: float, k: float) -> float:
    return 3 + 0.5 * c + 0.25 * n + 0.01 * c * (p + c / 2) + 0.02 * n * k


ROWS = [
    (c, p, n, k)
    for c in (0, 16, 36, 64)
    for p in (0, 100)
    for n in (0, 1, 8)
    for k in (0, 100)
    if (c or not p) and (n or not k) and (c or n)
]
OLD = "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us"


def table(*lines: str) -> str:
    return "\n".join(lines) + "\n"


def curves(axis: str, slopes: dict[str, float], at: tuple[int, ...], launch: float = 0.0) -> str:
    rows = [f"{name},{x},{launch + slope * x}" for name, slope in slopes.items() for x in at]
    return table(f"layer,{axis},time_us", *rows)


def batches(rows: Iterable[tuple[int, int, int, int]]) -> str:
    return table(OLD, *(f"{c},{p},{n},{k},{attention(c, p, n, k)}" for c, p, n, k in rows))


def write(
    folder: Path, sizes: dict[str, Any] = SIZES, degree: int = 1, **files: str | None
) -> Path:
    """A profile; files take the place of its own, None of nothing."""
    tp = folder / f"tp{degree}"
    tp.mkdir(parents=True)
    meta = {"hardware": "X9000", "engine_effective": {"hf_overrides": sizes}}
    (folder / "meta.yaml").write_text(yaml.safe_dump(meta))
    own: dict[str, str | None] = {
        "dense": curves("tokens", DENSE, (1, 100)),
        "per_sequence": curves("sequences", HEADS, (1, 10), LAUNCH),
        "attention": batches(ROWS),
    }
    for name, text in (own | files).items():
        if text is not None:
            (tp / f"{name}.csv").write_text(text)
    return folder


def stage(
    folder: Path, devices: int = 1, layers: int = 3, first: bool = True, last: bool = True,
    gpu: Gpu = PCIE, model: ModelShape = MODEL, kind: str = "X-9000", **engine: float,
) -> TableStage:  # fmt: skip
    part = StagePart(gpu, kind, model, layers, 1.0, first, last, devices, 2, 2)
    found = MeasuredTables.of(part, SimulateOptions(tables=str(folder), **engine))
    assert isinstance(found, TableStage)
    return found


def micros(folder: Path, work: Work, **options: Any) -> float:
    return stage(folder, **options).seconds(work) * 1e6


def per_token(counts: dict[str, int]) -> float:
    return sum(count * DENSE[name] for name, count in counts.items())


def test_a_curve_is_linear_between_and_beyond_its_points() -> None:
    curve = PiecewiseLinear({1: 10.0, 3: 30.0, 5: 40.0})
    assert [curve(x) for x in (0, 1, 2, 3, 4, 5, 7)] == [0, 10, 20, 30, 35, 40, 50]
    assert PiecewiseLinear({4: 2.0})(100) == 2.0
    # Beyond, along the line from half as far on: the noise of the last two points does not count.
    assert PiecewiseLinear({1: 10.0, 50: 500.0, 99: 970.0, 100: 1000.0})(200) == pytest.approx(2000)
    # A time is never below 0, and beyond its points it does not fall.
    assert PiecewiseLinear({1: 10.0, 2: 5.0})(4) == 5.0
    assert PiecewiseLinear({2: 5.0, 3: 10.0})(0.5) == 0.0


def test_curves_add_up_at_all_their_points() -> None:
    a, b = PiecewiseLinear({1: 1.0, 5: 9.0}), PiecewiseLinear({3: 10.0, 4: 30.0})
    total = add_up([(a, 2), (b, 1)])
    assert total.x == [1, 3, 4, 5]
    assert [total(x) for x in (1, 3, 3.5, 4, 5)] == [
        2 + 0,
        2 * 5 + 10,
        2 * 6 + 20,
        2 * 7 + 30,
        2 * 9 + 50,
    ]


def test_a_step_is_the_sum_of_its_operators(tmp_path: Path) -> None:
    folder = write(tmp_path / "t")
    # The chunks count as one of 36 tokens with their pairs.
    together = 3 + 0.5 * 36 + 0.25 * 4 + 0.01 * PAIRS + 0.02 * 280
    layer = 40 * per_token(LAYER) + together
    ends = 40 * (DENSE["embedding"] + DENSE["final_layernorm"])
    expected = 3 * layer + ends + 5 * 1007 + 2 * LAUNCH
    assert micros(folder, WORK) == pytest.approx(expected, rel=1e-6)
    engine = 0.5e6 + 6 * 0.25e6
    assert micros(folder, WORK, step_s=0.5, sequence_s=0.25) == pytest.approx(expected + engine)
    assert micros(folder, WORK, layers=2, first=False, last=False) == pytest.approx(2 * layer)
    first = 2 * layer + 40 * DENSE["embedding"]
    assert micros(folder, WORK, layers=2, last=False) == pytest.approx(first)


@pytest.mark.parametrize(
    ("work", "alone"),
    [
        (Work(4, 4, 4, 4, 280, []), 3 + 0.25 * 4 + 0.02 * 280),
        (Work(16, 0, 1, 0, 0, [(40, 16)]), 3 + 0.5 * 16 + 0.01 * 16 * 48),
        # Beyond the table: more decodes and longer contexts, a longer chunk further on.
        (Work(80, 80, 80, 80, 80 * 900, []), 3 + 0.25 * 80 + 0.02 * 80 * 900),
        (Work(640, 0, 1, 0, 0, [(900, 640)]), 3 + 0.5 * 640 + 0.01 * 640 * 1220),
        # Four short prompts: fewer pairs than one chunk of as many tokens has.
        (Work(64, 0, 4, 0, 0, [(0, 16)] * 4), 3 + 0.5 * 64 + 0.01 * 64 * 8),
    ],
    ids=["decodes", "a chunk", "many decodes", "a long chunk", "short prompts"],
)
def test_decodes_or_chunks_alone(work: Work, alone: float, tmp_path: Path) -> None:
    """No token is sampled, and no head computed, where a step has chunks' middles only."""
    dense = work.tokens * (3 * per_token(LAYER) + DENSE["embedding"] + DENSE["final_layernorm"])
    head = work.sampled * 1007 + 2 * LAUNCH if work.sampled else 0
    # Batches of both take longer here, which is nothing to those of one kind.
    rows = [(*row, attention(*row) * (3 if row[0] and row[2] else 1)) for row in ROWS]
    lines = [",".join(map(str, row)) for row in rows]
    folder = write(tmp_path / "t", attention=table(OLD, *lines))
    assert micros(folder, work) == pytest.approx(3 * alone + dense + head, rel=1e-5)


def test_without_batches_of_both_a_step_has_two_kernels(tmp_path: Path) -> None:
    alone = [row for row in ROWS if not (row[0] and row[2])]
    apart = write(tmp_path / "apart", attention=batches(alone))
    one_more_launch = 3 * 3
    both = micros(write(tmp_path / "both"), WORK)
    assert micros(apart, WORK) == pytest.approx(both + one_more_launch, rel=1e-5)


def test_a_packed_table_and_points_measured_twice(tmp_path: Path) -> None:
    folder = write(tmp_path / "t", dense=curves("tokens", DENSE, (1, 100), launch=1))
    expected = micros(folder, WORK)
    plain = folder / "tp1" / "attention.csv"
    head, *rows = plain.read_text().splitlines()
    far = [",".join([*row.split(",")[:4], str(float(row.split(",")[4]) + 2)]) for row in rows]
    near = [",".join([*row.split(",")[:4], str(float(row.split(",")[4]) - 2)]) for row in rows]
    with gzip.open(folder / "tp1" / "attention.csv.gz", "wt") as file:
        file.write(table(head, *far, *near))
    plain.unlink()
    dense = [curves("tokens", DENSE, (1, 100), launch).splitlines() for launch in (1.5, 0.5)]
    (folder / "tp1" / "dense.csv").write_text(table(*dense[0], *dense[1][1:]))
    assert micros(folder, WORK) == pytest.approx(expected, rel=1e-6)


def test_the_newer_columns_mean_the_same(tmp_path: Path) -> None:
    """Newer tables have the average that chunks see, not what lies before, and more columns."""
    rows = [
        f"attention,{c},{p + c / 2 if c else 999},{n},{k if n else 99},1,{attention(c, p, n, k)},v4"
        for c, p, n, k in ROWS
    ]
    rows.append("attention,0,0,1,100,4,1e9,v4")
    head = "layer,prefill_chunk,prefill_key,n_decode,kv_decode,decode_q_len,time_us,protocol"
    newer = write(tmp_path / "newer", attention=table(head, *rows))
    old = write(tmp_path / "old")
    for work in (WORK, Work(1, 1, 1, 1, 100, []), Work(16, 0, 1, 0, 0, [(40, 16)])):
        assert micros(newer, work) == pytest.approx(micros(old, work), rel=1e-6)


@pytest.mark.parametrize(("name", "count"), [("qk_norm", 1), ("add", 1), ("all_reduce", 2)])
def test_operators_that_only_some_have(name: str, count: int, tmp_path: Path) -> None:
    """Operators count once per layer, but for the two all-reduces."""
    without = micros(write(tmp_path / "without"), WORK)
    dense = curves("tokens", DENSE | {name: 0.125}, (1, 100))
    found = micros(write(tmp_path / "with", dense=dense), WORK)
    assert found == pytest.approx(without + 3 * count * 40 * 0.125)


NVLINK = find_gpu("A100-80G-SXM")


@pytest.mark.parametrize(
    ("gpu", "gb_s", "each"),
    [
        (PCIE, 17.0, 30.0),
        (PCIE.model_copy(update={"link_gb_s": 8.0}), 8.0, 30.0),
        (PCIE.model_copy(update={"all_reduce_gb_s": 40.0, "all_reduce_s": 9e-6}), 40.0, 9.0),
        (PCIE.model_copy(update={"all_reduce_s": 0.0}), 17.0, 0.0),
        (NVLINK, 150.0, 12.0),
    ],
    ids=["pcie", "slow", "stated", "at once", "nvlink"],
)
def test_collectives_that_no_table_has(gpu: Gpu, gb_s: float, each: float, tmp_path: Path) -> None:
    """Rings of two: an all-reduce sends all its bytes each way, a gather half of what results."""
    folder = write(tmp_path / "t")
    write(tmp_path / "t2", degree=2)
    (tmp_path / "t2" / "tp2").rename(folder / "tp2")

    def more(work: Work, **options: Any) -> float:
        one, two = (micros(folder, work, gpu=gpu, devices=n, **options) for n in (1, 2))
        return two - one

    hidden, logits = 40 * 8 * 2 / gb_s * 1e-3, 5 * 10 * 2 / 2 / gb_s * 1e-3
    assert more(WORK) == pytest.approx(7 * (each + hidden) + each + logits)
    assert more(WORK, layers=2, last=False) == pytest.approx(5 * (each + hidden))
    assert more(WORK, layers=1, first=False) == pytest.approx(2 * (each + hidden) + each + logits)
    nothing_sampled = Work(16, 0, 1, 0, 0, [(40, 16)])
    assert more(nothing_sampled) == pytest.approx(7 * (each + hidden * 16 / 40))
    # Where the tables have it, theirs counts.
    dense = curves("tokens", DENSE | {"all_reduce": 0.125}, (1, 100))
    (folder / "tp2" / "dense.csv").write_text(dense)
    assert more(WORK) == pytest.approx(3 * 2 * 40 * 0.125)


def test_a_ring_of_four(tmp_path: Path) -> None:
    """Devices send 3/4 of the bytes twice; of the logits, the others' 3/4 come in."""
    for degree in (1, 4):
        write(tmp_path / f"t{degree}", degree=degree)
    one = micros(tmp_path / "t1", WORK)
    four = micros(tmp_path / "t4", WORK, devices=4)
    hidden, logits = 1.5 * 40 * 8 * 2 / 17 * 1e-3, 0.75 * 5 * 10 * 2 / 17 * 1e-3
    assert four - one == pytest.approx(7 * (30 + hidden) + 30 + logits)


def test_it_says_what_it_read(tmp_path: Path) -> None:
    holes = [row for row in ROWS if row not in ((36, 0, 1, 100), (64, 100, 8, 100))]
    folder = write(tmp_path / "t", degree=2, attention=batches(holes), skew="", step="x")
    assert stage(folder, devices=2, last=False).read == {
        "folder": str(folder / "tp2"),
        "per_layer": {**LAYER, "attention": 1},
        "per_step": ["embedding"],
        "per_sequence": [],
        "tokens": [1, 100],
        "attention": {
            "chunks alone": {"points": 6, "filled_in": 0},
            "decodes alone": {"points": 4, "filled_in": 0},
            "both": {"points": 22, "filled_in": 2},
        },
        "not_read": ["skew.csv", "step.csv"],
        "collectives": {"gb_s": 17.0, "each_s": 30e-6, "all_reduces_per_layer": 2},
    }


# Sizes of one of two devices, as the profiler leaves them of the last degree.
HALF = {"intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 5}


def test_sizes_may_be_those_of_a_profiled_degree(tmp_path: Path) -> None:
    write(tmp_path / "t", sizes=HALF | {"head_dim": 2, "hidden_size": 8, "torch_dtype": "bfloat16"})
    with pytest.raises(JaxinferError, match="profiled with intermediate_size 8, the model has 16"):
        stage(tmp_path / "t")
    (tmp_path / "t" / "tp2").mkdir()
    stage(tmp_path / "t")
    write(tmp_path / "mixed", sizes=HALF | {"vocab_size": 10}, degree=2)
    with pytest.raises(
        JaxinferError, match="with vocab_size 10, the model has 10, whole or over 2"
    ):
        stage(tmp_path / "mixed", devices=2)
    write(tmp_path / "hidden", sizes=HALF | {"hidden_size": 4}, degree=2)
    with pytest.raises(JaxinferError, match="profiled with hidden_size 4, the model has 8"):
        stage(tmp_path / "hidden", devices=2)
    write(tmp_path / "head", sizes=SIZES | {"head_dim": 4})
    with pytest.raises(JaxinferError, match="profiled with head_dim 4, the model has 2"):
        stage(tmp_path / "head")


@pytest.mark.parametrize(
    ("kind", "fits"),
    [
        ("X9000", True),
        ("x-9000-96G", True),
        ("Maker X 9000", True),
        ("X90000", False),
        ("Y", False),
    ],
)
def test_tables_are_of_the_groups_gpu(kind: str, fits: bool, tmp_path: Path) -> None:
    folder = write(tmp_path / "t")
    if fits:
        stage(folder, kind=kind)
    else:
        with pytest.raises(JaxinferError, match=f"profiled on X9000, the group has {kind}: its na"):
            stage(folder, kind=kind)


def broken(name: str, text: str | None) -> Callable[[Path], TableStage]:
    return lambda path: stage(write(path / "t", **{name: text}))


def of_model(**sizes: int) -> ModelShape:
    return MODEL.model_copy(update=sizes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: stage(path), "meta.yaml: No such file or directory"),
        (
            lambda path: stage(write(path / "t"), model=of_model(intermediate_size=32)),
            "meta.yaml: profiled with intermediate_size 16, the model has 32",
        ),
        (
            lambda path: stage(write(path / "t"), model=of_model(num_experts=2)),
            "t/tp1: dense.csv has act_fn, down_proj, gate_up_proj: how often",
        ),
        (
            lambda path: stage(write(path / "t"), devices=2),
            "t/tp2: no such folder; tp1 was profiled",
        ),
        (broken("dense", None), "dense.csv: No such file or directory"),
        (broken("dense", ""), "dense.csv lacks the column layer"),
        (broken("dense", "layer,tokens\n"), "dense.csv lacks the column time_us"),
        (
            broken(
                "dense", curves("tokens", {k: v for k, v in DENSE.items() if k != "o_proj"}, (1,))
            ),
            "dense.csv lacks o_proj",
        ),
        (
            broken("dense", curves("tokens", DENSE | {"router": 1.0}, (1,))),
            "dense.csv has router: how often that runs is not known; known: layernorm, qkv_proj, ",
        ),
        (
            broken("per_sequence", curves("sequences", HEADS | {"drafter": 1.0}, (1,))),
            "per_sequence.csv has drafter: how often that runs is not known; known: lm_head, samp",
        ),
        (
            broken("dense", "layer,tokens,time_us\nact_fn,1,fast\n"),
            "dense.csv, line 2: tokens, time_us must be numbers from 0 on, not act_fn,1,fast",
        ),
        (broken("dense", "layer,tokens,time_us\nact_fn,1,nan\n"), "dense.csv, line 2: tokens, "),
        (broken("dense", "layer,tokens,time_us\nact_fn,1,-1\n"), "dense.csv, line 2: tokens, "),
        (broken("dense", "layer,tokens,time_us\nact_fn,1\n"), "dense.csv, line 2: tokens, "),
        (broken("moe", ""), "tp1: moe.csv has operators that tables do not model"),
        (broken("attention", table(OLD, "0,0,1,16,2")), "attention.csv has no chunks alone"),
        (broken("attention", table(OLD, "8,0,0,0,2")), "attention.csv has no decodes alone"),
        (
            broken("attention", table(OLD, "8,0,0,0,0")),
            "attention.csv has an empty batch, or one of",
        ),
        (
            broken("attention", table(OLD, "0,0,0,0,2")),
            "attention.csv has an empty batch, or one of",
        ),
        (
            broken("attention", table(f"layer,{OLD}", "indexer,8,0,0,0,2")),
            "attention.csv has indexer: how often that runs is not known",
        ),
    ],
)
def test_what_is_no_profile_of_the_model_is_refused(
    make: Callable[[Path], TableStage], message: str, tmp_path: Path
) -> None:
    with pytest.raises(JaxinferError) as error:
        make(tmp_path)
    assert message in str(error.value)
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_packed_file_that_is_cut_off(tmp_path: Path) -> None:
    folder = write(tmp_path / "t", attention=None)
    packed = gzip.compress(table(OLD, *["0,0,1,16,2"] * 999).encode())
    (folder / "tp1" / "attention.csv.gz").write_bytes(packed[:-12])
    with pytest.raises(JaxinferError, match=r"attention\.csv: Compressed file ended"):
        stage(folder)


def test_stages_share_what_the_files_have_until_it_changes(tmp_path: Path) -> None:
    folder = write(tmp_path / "t")
    one, other = stage(folder), stage(folder, layers=2)
    before = one.seconds(WORK)
    # The same step, and one that is equal, and another, in any order.
    more = Work(41, 5, 7, 5, 380, [(40, 16), (10, 20)])
    assert one.seconds(WORK) == before == one.seconds(Work(40, 4, 6, 5, 280, WORK.chunks))
    assert other.seconds(more) < one.seconds(more)
    assert one.seconds(WORK) == before
    rows = [(c, p, n, k) for c, p, n, k in ROWS]
    text = batches(rows).replace("\n0,0,8,100,", "\n0,0,8,100,9")
    (folder / "tp1" / "attention.csv").write_text(text)
    changed = stage(folder)
    assert changed.seconds(Work(8, 8, 8, 8, 800, [])) > one.seconds(Work(8, 8, 8, 8, 800, []))
    (folder / "tp1" / "dense.csv").unlink()
    with pytest.raises(JaxinferError, match=r"dense\.csv: No such file"):
        stage(folder)


@pytest.mark.parametrize("last", [True, False])
def test_decodes_by_their_entries_take_the_same_time_to_the_last_digit(
    last: bool, tmp_path: Path
) -> None:
    """Rows and contexts lie on points of the table, between them, and beyond."""
    folder = write(tmp_path / "t", degree=2)
    made = stage(folder, devices=2, last=last, step_s=1e-3, sequence_s=1e-5)
    for rows in (1, 3, 8, 11):
        seconds = made.decode_seconds(rows)
        for entries in (rows, 50 * rows, 100 * rows, 150 * rows + 1, 9999):
            assert seconds(entries) == made.seconds(Work(rows, rows, rows, rows, entries, [], rows))
