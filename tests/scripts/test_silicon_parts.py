"""What predictions lack is divided into the parts that it was made of."""

from itertools import product

import pytest

from jaxinfer.lab.validate.points import Point
from scripts.validate.silicon_parts import fit, named

STEP_MS, SEQUENCE_MS, TOKEN_MS = 0.7, 0.02, 0.003


def test_parts_are_those_that_points_were_made_of() -> None:
    group, predicted = [], {}
    for number, (at_once, isl, osl) in enumerate(product((8, 64), (1024, 4096), (128, 512))):
        tpot = 5.0 + 0.1 * at_once
        lacking = STEP_MS + SEQUENCE_MS * at_once + TOKEN_MS * at_once * isl / osl
        row = {"id": str(number)}
        group.append(Point(row, at_once, isl, osl, 2, 50.0, tpot + lacking))
        predicted[row["id"]] = tpot
    found = fit(group, predicted)
    assert found["ms per step"] == pytest.approx(STEP_MS)
    assert found["us per sequence"] == pytest.approx(1e3 * SEQUENCE_MS)
    assert found["us per prompt token"] == pytest.approx(1e3 * TOKEN_MS)
    assert found["left %"] == 0.0
    errors = sorted(1 - predicted[p.id] / p.tpot_ms for p in group)
    assert found["error %"] == pytest.approx(50 * (errors[3] + errors[4]), abs=0.05)


def test_a_group_is_named_without_its_models_owner() -> None:
    named_group = named(("me/my-8b", "h100_sxm", "vllm", "", "4"))
    assert named_group == {"group": "my-8b h100_sxm vllm", "GPUs": "4"}
