"""Run files with FFN groups: what does not go together is refused by name."""

from typing import Any

import pytest

from jaxinfer.config.resolve import resolve
from jaxinfer.config.run_file import as_run_file
from jaxinfer.errors import JaxinferError

STAGE = {"group": "a", "ffn": "f"}


def run_file(
    groups: dict[str, Any] | None = None, stages: list[dict[str, Any]] | None = None, **options: Any
) -> Any:
    return resolve(
        as_run_file(
            {
                "model": "llama-3-8b",
                "groups": {"a": {}, "f": {}} | (groups or {}),
                "instances": {"x": {"stages": stages or [STAGE]} | options},
                "system": "single",
            }
        )
    )


def test_a_stage_with_an_ffn_group() -> None:
    slow = {name: {"emulate": {"slowdown": 2}} for name in "af"}
    found = run_file(slow, micro_batches=4).cluster.instances["x"]
    assert found.ffn_groups == ["f"]
    assert found.micro_batches == 4


@pytest.mark.parametrize(
    ("groups", "stages", "options", "message"),
    [
        ({}, [{"group": "a", "ffn": "g"}], {}, r"instances\.x\.stages\[0\]\.ffn: no group 'g'"),
        ({}, [{"group": "a", "ffn": "a"}], {}, r"ffn: group a has attention, must have none"),
        (
            {"b": {}},
            [STAGE, {"group": "b", "ffn": "f"}],
            {},
            r"stages\[1\]\.ffn: group f has the FFN of instances\.x\.stages\[0\], must be of one",
        ),
        ({"b": {}}, [STAGE, {"group": "b"}], {}, r"stages: give ffn for all of them, or for none"),
        (
            {"w": {}},
            [STAGE | {"attention": ["w"]}],
            {"enable_prefix_caching": False},
            r"stages: attention and ffn are not supported together",
        ),
        ({}, None, {"layout": "fsdp"}, r"layout is fsdp, must be left out with ffn"),
        ({}, None, {"computes": False}, r"computes is False, must be True with ffn"),
        ({}, None, {"segments": 2}, r"segments is 2, must be 1 with ffn"),
        (
            {"f": {"process": "own"}},
            None,
            {},
            r"group f has a process of its own, must a have, too",
        ),
        (
            {"a": {"process": "own"}},
            None,
            {},
            r"group a has a process of its own, must f have, too",
        ),
        (
            {"a": {"process": "own"}, "f": {"process": "own", "emulate": {"slowdown": 2}}},
            None,
            {},
            r"groups\.f\.emulate: leave it out with ffn, unless the instance has one stage",
        ),
        (
            {"a": {"emulate": {"slowdown": 2}}, "b": {}, "g": {}},
            [STAGE, {"group": "b", "ffn": "g"}],
            {},
            r"groups\.a\.emulate: leave it out with ffn, unless the instance has one stage",
        ),
        (
            {"f": {"devices": 2, "tensor_parallel_size": 1}},
            None,
            {},
            r"groups\.f\.tensor_parallel_size is 1, must be 2: all of its devices",
        ),
        ({}, [{"group": "a"}], {"micro_batches": 2}, r"micro_batches is 2, must be 1 without a"),
        ({}, None, {"half_batches": "always"}, r"half_batches is always, must be never without"),
    ],
)
def test_what_does_not_go_together(
    groups: dict[str, Any],
    stages: list[dict[str, Any]] | None,
    options: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(JaxinferError, match=message):
        run_file(groups, stages, **options)


def test_replicas_have_ffn_groups_of_their_own() -> None:
    file = {
        "model": "llama-3-8b",
        "groups": {"a": {"replicas": 2}, "f": {"replicas": 2}},
        "instances": {"x": {"replicas": 2, "stages": [STAGE]}},
        "system": "least_loaded",
    }
    instances = resolve(as_run_file(file)).cluster.instances
    assert {name: each.ffn_groups for name, each in instances.items()} == {
        "x0": ["f0"],
        "x1": ["f1"],
    }
