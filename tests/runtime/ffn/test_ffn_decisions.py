"""The simulator decides as real runs with FFN groups did, micro-batches included."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.steps import profile as stored
from scripts.validate import decisions
from scripts.validate.decision_cases import WORKLOADS, sections


def apart(
    names: str, micro_batches: int, own: bool, system: str, cluster: str, seed: int
) -> dict[str, Any]:
    """A run file in which stages on these groups have FFN groups of their own.

    Args:
        own: whether each group has a process of its own.
    """
    data = sections(system, cluster, seed)
    groups = data["groups"]
    if own:
        data["groups"] = groups = {name: {"process": "own"} | each for name, each in groups.items()}
    for instance in data["instances"].values():
        stages = instance.pop("stages", None) or [{"group": instance.pop("group")}]
        if not {stage["group"] for stage in stages} <= {*names}:
            instance["group"] = stages[0]["group"]
            continue
        instance["stages"] = [stage | {"ffn": f"{stage['group']}_ffn"} for stage in stages]
        instance["micro_batches"] = micro_batches
        for stage in instance["stages"]:
            like = groups[stage["group"]]
            groups[stage["ffn"]] = {k: like[k] for k in ("process", "restart") if k in like}
    return data


@pytest.mark.parametrize(
    ("system", "clusters", "micro_batches", "own"),
    [
        pytest.param("single", ("small",), 2, False, marks=pytest.mark.slow),
        pytest.param("single", ("roomy", "cached"), 4, False, marks=pytest.mark.long),
        pytest.param("single", ("meshes",), 2, False, marks=pytest.mark.long),
        pytest.param("disaggregated", ("roomy", "small"), 2, False, marks=pytest.mark.long),
        pytest.param("single", ("small",), 2, True, marks=pytest.mark.slow),
        pytest.param("single", ("roomy", "cached"), 4, True, marks=pytest.mark.long),
        pytest.param("single", ("meshes",), 2, True, marks=pytest.mark.long),
        pytest.param("single", ("processes",), 2, True, marks=pytest.mark.long),
    ],
)
def test_decisions_are_equal(
    system: str,
    clusters: Sequence[str],
    micro_batches: int,
    own: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last case loses the process of the FFN group, and has it back."""
    names = "de" if system == "disaggregated" else "pq"
    monkeypatch.setattr(decisions, "sections", partial(apart, names, micro_batches, own))
    monkeypatch.setattr(stored, "FOLDER", tmp_path / "profiles")
    asked = [name for name, (cluster, *_) in WORKLOADS.items() if cluster in clusters]
    rows = list(decisions.ledgers(system, asked, 1, tmp_path))
    assert [(row["workload"], row["difference"]) for row in rows] == [(n, "") for n in asked]
    assert all(" halves:" in row["kinds"] for row in rows)
    assert all(row["entries"] > 20 for row in rows)
    lossy = [row["workload"] for row in rows if (row["lost"], row["back"]) == (1, 1)]
    assert lossy == [name for name in asked if WORKLOADS[name][2] == "lost"]
