"""Operator tables: interpolation, sums over a step, what is refused."""

import gzip
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer import JaxinferError
from jaxinfer.serving.work import Work
from jaxinfer.simulate.hardware import ModelShape
from jaxinfer.simulate.tables import FIRST, LAST, PER_LAYER, PER_SEQUENCE, Curve, Grid, TableStage

MODEL = ModelShape(
    hidden_size=8, intermediate_size=16, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=10,
)  # fmt: skip
SIZES = {"intermediate_size": 16, "num_attention_heads": 4, "num_hidden_layers": 1}


def test_a_curve_is_linear_between_and_beyond_its_points() -> None:
    curve = Curve({1: 10.0, 3: 30.0, 5: 40.0})
    assert [curve(x) for x in (1, 2, 3, 4, 5, 7)] == [10, 20, 30, 35, 40, 50]
    assert Curve({4: 2.0})(100) == 2.0


@given(
    a=st.floats(-5, 5), b=st.floats(-5, 5), c=st.floats(-5, 5), d=st.floats(-5, 5),
    x=st.floats(0, 4), y=st.floats(1, 9),
)  # fmt: skip
def test_a_grid_is_exact_for_what_is_linear_in_each(
    a: float, b: float, c: float, d: float, x: float, y: float
) -> None:
    def truth(x: float, y: float) -> float:
        return a + b * x + c * y + d * x * y

    grid = Grid({(i, j): truth(i, j) for i in (0, 1, 4) for j in (1, 2, 9)})
    assert grid(x, y) == pytest.approx(truth(x, y), abs=1e-9)


def test_a_grid_says_where_it_knows_nothing() -> None:
    grid = Grid({(0, 0): 1.0, (1, 0): 2.0, (0, 1): 3.0})
    assert grid(0.5, 0) == 1.5
    assert grid(0.5, 0.5) is None  # One corner was not measured.
    assert grid(2, 0) is None
    assert grid(-1, 0) is None


def write(folder: Path, sizes: dict[str, int], lacking: str = "") -> Path:
    """Operators that take their place in the list, in us, per token; attention its entries."""
    tp = folder / "tp1"
    tp.mkdir(parents=True)
    meta = {"engine_effective": {"hf_overrides": sizes}}
    (folder / "meta.yaml").write_text(yaml.safe_dump(meta))
    dense = [
        f"{name},{n},{place * n}"
        for place, name in enumerate([*PER_LAYER, *FIRST, *LAST], 1)
        for n in (1, 100)
        if name != lacking
    ]
    (tp / "dense.csv").write_text("\n".join(["layer,tokens,time_us", *dense]) + "\n")
    heads = [f"{name},{n},{1000 * n}" for name in PER_SEQUENCE for n in (1, 10)]
    (tp / "per_sequence.csv").write_text("\n".join(["layer,sequences,time_us", *heads]) + "\n")
    rows = [
        f"{c},{p},{n},{k},{c * p + n * k}"
        for c in (0, 16, 64) for p in (0, 100) for n in (0, 1, 8) for k in (0, 100)
        if (c or not p) and (n or not k) and (c or n)
    ]  # fmt: skip
    with gzip.open(tp / "attention.csv.gz", "wt") as file:
        file.write("\n".join(["prefill_chunk,kv_prefill,n_decode,kv_decode,time_us", *rows]) + "\n")
    return folder


def test_a_step_is_the_sum_of_its_operators(tmp_path: Path) -> None:
    stage = TableStage(write(tmp_path / "t", SIZES), MODEL, "A10", 1, 3, True, True, 0.5, 0.25)
    # Two chunks of 16 and 20 after 40 and 10 entries, and 4 decodes that see 70 on average.
    work = Work(40, 4, 6, 5, 280, [(40, 16), (10, 20)])
    per_token = 2 * 1 + 2 + 3 + 4 + 5 + 6 + 7
    attention = 16 * 40 + 20 * 10 + 4 * 70
    micros = 3 * (40 * per_token + attention) + 40 * 8 + 40 * 9 + 2 * 5000
    assert stage.seconds(work) == pytest.approx(micros * 1e-6 + 0.5 + 6 * 0.25)
    middle = TableStage(tmp_path / "t", MODEL, "A10", 1, 2, False, False)
    assert middle.seconds(work) == pytest.approx(2 * (40 * per_token + attention) * 1e-6)


def test_what_is_no_profile_of_the_model_is_refused(tmp_path: Path) -> None:
    other = write(tmp_path / "other", SIZES | {"intermediate_size": 32})
    with pytest.raises(JaxinferError, match="profiled with intermediate_size 32, the model has 16"):
        TableStage(other, MODEL, "A10", 1, 3, True, True)
    lacking = write(tmp_path / "lacking", SIZES, lacking="o_proj")
    with pytest.raises(JaxinferError, match=r"dense\.csv lacks o_proj"):
        TableStage(lacking, MODEL, "A10", 1, 3, True, True)
    with pytest.raises(JaxinferError, match=r"tp2.*dense\.csv: No such file"):
        TableStage(lacking, MODEL, "A10", 2, 3, True, True)
    with pytest.raises(JaxinferError, match=r"meta\.yaml: No such file"):
        TableStage(tmp_path, MODEL, "A10", 1, 3, True, True)
