"""What does not divide: tokens are padded, layouts are refused in rows of their own."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from jaxinfer.errors import JaxinferError
from jaxinfer.lab.sharding.compiling import Compiled, LayerJob, compile_all
from jaxinfer.lab.sharding.study import LayoutQuestion, study
from jaxinfer.lab.sharding.table import tables, write_csvs
from jaxinfer.lab.sharding.targets import CompileTarget
from jaxinfer.models.layouts import LAYOUTS
from jaxinfer.sharding.links import links_of
from scripts.validate.sharding import question
from tests.sharding.test_layout_search import TINY

NAMES = ("sequence_parallel", "attention_dp", "weight_gathered")


def three_devices(tokens: int, sequences: int) -> LayoutQuestion:
    asked, mesh = question(TINY, "1x3", tokens, sequences, 8), {"x": 3}
    return replace(asked, mesh=mesh, links=links_of(asked.card, mesh))


def test_tokens_are_padded_and_the_rest_is_refused_by_row(tmp_path: Path) -> None:
    asked = three_devices(7, 1)
    found, refused = study(asked, {name: LAYOUTS[name] for name in NAMES}, tmp_path / "kept")
    assert {(each.layout, each.phase) for each in found} == {
        (name, phase) for name in NAMES[:2] for phase in ("prefill", "decode", "head")
    }
    assert all(each.equal for each in found)
    padded = {(each.phase, each.padding.rpartition(", ")[2]) for each in found}
    said = "7 tokens as 9", "1 sequence as 3", "1 sequence as 3"
    assert padded == {*zip(("prefill", "decode", "head"), said, strict=True)}
    why = "axis D of layers.0.attn.q_DNH is 256 long, 3 pieces do not divide it"
    assert [(each.layout, each.phase, each.why) for each in refused] == [
        ("weight_gathered", phase, why) for phase in ("prefill", "decode", "head")
    ]
    # Seconds are of the padded tokens, too.
    whole, _ = study(three_devices(9, 3), {"attention_dp": LAYOUTS["attention_dp"]}, tmp_path)
    links = {each.phase: each.seconds.links for each in whole}
    of = {each.phase: each.seconds.links for each in found if each.layout == "attention_dp"}
    assert of == links

    for table in tables(asked, found, refused, "t"):
        assert list(table.columns[0].cells) == [*NAMES[:2], "weight_gathered"]
    write_csvs(tmp_path, asked, found, refused, {})
    rows = list(csv.DictReader((tmp_path / "layouts.csv").open()))
    assert [row["refused"] for row in rows] == [""] * 6 + [why] * 3


def test_no_layout_is_left(tmp_path: Path) -> None:
    with pytest.raises(JaxinferError, match=r"^layout weight_gathered: axis D of layers.0.attn"):
        study(three_devices(9, 3), {"weight_gathered": LAYOUTS["weight_gathered"]}, tmp_path)


def test_a_compilers_reason_is_of_one_layout() -> None:
    """The first line of what it says; the next job is compiled."""
    asked = three_devices(7, 1)
    good = asked.job("good", LAYOUTS["sequence_parallel"], "head")
    assert isinstance(good, LayerJob)
    target, mesh = CompileTarget("cpu", (3,)), {"x": 3}
    jobs = [replace(good, tokens=7), good]
    refused, compiled = compile_all(target, mesh, TINY, "float32", jobs)
    assert isinstance(compiled, Compiled)
    assert isinstance(refused, str)
    assert refused.startswith("the compiler for cpu:3: ")
    assert "the dimension size is 7" in refused
    assert "For simplicity" not in refused
