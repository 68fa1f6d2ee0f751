"""Names of groups do not make another run file."""

from collections.abc import Mapping
from typing import Any

import pytest
from plan_cases import RUN, Carries, problem

from jaxinfer.lab.plan.candidate import Candidate
from jaxinfer.lab.plan.canonical import nameless
from jaxinfer.lab.plan.search import DrivenSearch

COSTS = {"a": {"flops": 0.3}, "b": {"flops": 0.4}, "c": {"flops": 0.5}}


def run_file(names: Mapping[str, str], reverse: bool = False, **change: Any) -> dict[str, Any]:
    """Three groups, by these names, in this or in the other order."""
    a, b, c = (names.get(name, name) for name in "abc")
    kinds = {a: "A10", b: "L4", c: "L4"}
    order = reversed(kinds.items()) if reverse else kinds.items()
    return {
        **RUN,
        "groups": {name: {"kind": kind} for name, kind in order},
        "instances": {
            "x": {"stages": [{"group": a}, {"group": b}], "launch_ahead": False},
            "y": {"group": c},
        },
        "links": [{"between": [b, a] if reverse else [a, b], "gb_s": 1.0}],
        "system": {"name": "disaggregated", "prefill": "x", "decode": "y"},
        "simulate": {"groups": {names.get(name, name): cost for name, cost in COSTS.items()}},
        **change,
    }


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    "names", [{"a": "first", "b": "second"}, {"a": "b", "b": "c", "c": "a"}, {"a": "z"}]
)
def test_other_names_are_no_other_file(names: dict[str, str], reverse: bool) -> None:
    assert nameless(run_file(names, reverse)) == nameless(run_file({}))


def test_names_of_ffn_groups_do_not_count_but_their_places_do() -> None:
    def file(own: str, ffn: str, kind: str) -> dict[str, Any]:
        stage = {"group": own, "ffn": ffn}
        groups = {own: {"kind": "A10"}, ffn: {"kind": kind}}
        return {**RUN, "groups": groups, "instances": {"x": {"stages": [stage]}}}

    assert nameless(file("a", "b", "L4")) == nameless(file("b", "z", "L4"))
    assert nameless(file("a", "b", "L4")) != nameless(file("a", "b", "A10"))
    swapped = file("a", "b", "L4")
    swapped["instances"]["x"]["stages"] = [{"group": "b", "ffn": "a"}]
    assert nameless(file("a", "b", "L4")) != nameless(swapped)


@pytest.mark.parametrize(
    "change",
    [
        {"links": [{"between": ["a", "c"], "gb_s": 1.0}]},
        {"instances": {"x": {"group": "a"}, "y": {"stages": [{"group": "c"}, {"group": "b"}]}}},
        {"simulate": {"groups": COSTS | {"a": COSTS["b"]}}},
        {"system": {"name": "disaggregated", "prefill": "y", "decode": "x"}},
    ],
)
def test_what_else_differs_counts(change: dict[str, Any]) -> None:
    assert nameless(run_file({}, **change)) != nameless(run_file({}))


def test_a_name_that_stands_elsewhere_stays() -> None:
    """A group that is called like its GPU, say: the one of the other kind is another file."""
    found = []
    for kind in ("A10", "L4"):
        file = {**RUN, "groups": {kind: {"kind": kind}}, "instances": {"i": {"group": kind}}}
        found.append(nameless(file))
        assert found[-1]["groups"].keys() == {kind}
    assert found[0] != found[1]


def test_replicas_and_attention_groups() -> None:
    """Replicas and attention groups are the same as names that are written out."""
    groups = {"g": {"kind": "A10", "replicas": 2}, "h": {"kind": "L4", "replicas": 2}}
    place = [{"group": "g", "attention": ["h"]}]
    system = {"name": "least_loaded"}
    short = {"groups": groups, "instances": {"i": {"stages": place, "replicas": 2}}}
    wide = {
        "groups": {f"p{n}": {"kind": kind} for n, kind in enumerate(["L4", "A10", "A10", "L4"])},
        "instances": {
            "i0": {"stages": [{"group": "p1", "attention": [{"group": "p0"}]}]},
            "i1": {"stages": [{"group": "p2", "attention": [{"group": "p3"}]}]},
        },
    }
    own = {"engine": {"enable_prefix_caching": False}, "system": system}
    assert nameless({**RUN, **own, **short}) == nameless({**RUN, **own, **wide})


def test_they_are_simulated_once(carries: Carries) -> None:
    """Candidates that differ in names alone are simulated once, in one wave and in the next."""
    several = []
    for number, names in enumerate([{}, {"a": "b", "b": "a"}, {"c": "d"}]):
        part = {key: value for key, value in run_file(names).items() if key not in RUN}
        several.append(Candidate({"number": number}, part))
    search = DrivenSearch(problem({"minimise": "gpus", "rate": 0.5, "at_once": 2}))
    scores = search.scores(several)
    assert len(search.tried) == 3
    assert len(carries.tried) == 1
    assert scores == [scores[0]] * 3
