"""Reports of a user's code, value by value, as JSON gives them back."""

import json
from typing import Any

import numpy as np

from jaxinfer.report.plain import reported


class Odd:
    def __repr__(self) -> str:
        return "an Odd"


def test_what_is_reported_survives_json() -> None:
    given: dict[Any, Any] = {
        "none": None,
        (1, 2): {(3, 4): {None: True}},
        "names": {f"n{i}" for i in range(9)},
        "mixed": frozenset({"b", 1, ("a",)}),
        "numpy": [np.float64(0.5), np.bool_(True), np.arange(4).reshape(2, 2)],
    }
    found, wrong = reported("Mine.report", lambda: given)
    assert wrong is None
    assert (
        json.loads(json.dumps(found))
        == found
        == {
            "none": None,
            "(1, 2)": {"(3, 4)": {"None": True}},
            "names": [f"n{i}" for i in range(9)],
            "mixed": ["b", ["a"], 1],
            "numpy": [0.5, True, [[0, 1], [2, 3]]],
        }
    )


def test_every_odd_value_is_named_where_it_lies() -> None:
    given = {"a": (1, {Odd()}), "b": {"c": np.array([2, Odd()], dtype=object)}, "d": 1j}
    found, wrong = reported("Mine.report", lambda: given)
    assert found == {"a": [1, ["an Odd"]], "b": {"c": [2, "an Odd"]}, "d": "1j"}
    assert wrong == (
        "Mine.report returns what JSON cannot hold: a is an Odd; b.c is an Odd; d is 1j"
    )
