"""Splitwise, DistServe, TetriInfer, HexGen-2, Aladdin: tokens of four instances as of one."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_cases import LAYERS, G, H, Loader, roomy, set_pools, set_system
from cluster_checks import Done, Ran, check_transfers, serve, token_bytes

from jaxinfer import LLM
from jaxinfer.serving.step_fit import DecodeFit, MixedFit, PrefillFit, StepFit

INSTANCES: dict[str, Any] = {
    "p": {"stages": [{"group": "g", "layers": 1}, {"group": "h", "layers": 3}]} | roomy(8),
    "q": {"group": "k"} | roomy(16),
    "d": {"group": "h"} | roomy(32),
    "e": {"group": "g"} | roomy(8),
}
UNITS = [{"prefill": "p", "decode": "d"}, {"prefill": "q", "decode": "e"}]
ONE_UNIT = [{"prefill": ["p", "q"], "decode": ["d", "e"]}]


@pytest.fixture(scope="module")
def four(loader: Loader) -> LLM:
    return loader.load(
        "two", groups={"g": G, "h": H, "k": {}}, instances=INSTANCES, verify_transfers=True
    )


def run(llm: LLM, system: dict[str, Any], folder: Path, pages: dict[str, int]) -> tuple[Ran, Any]:
    """Return the run and its tokens; pools as small as ``pages`` hold one long request."""
    set_system(llm, system)
    set_pools(llm, pages, caching=False)
    done = serve(llm, run_dir=folder)
    ran = Ran.last(folder)
    check_transfers(ran, token_bytes("two"))
    assert ran.metrics["failed"] == ran.metrics["late_compiles"] == 0
    return ran, done


@pytest.mark.parametrize("pages", [{}, {"d": 5, "e": 18}], ids=["roomy", "small"])
@pytest.mark.parametrize("units", [UNITS, ONE_UNIT], ids=["two", "one"])
def test_distserve(
    four: LLM, expected: dict[str, list[Done]], units: Any, pages: dict[str, int], tmp_path: Path
) -> None:
    ran, done = run(four, {"name": "distserve", "units": units}, tmp_path, pages)
    assert done == expected["two"]
    pairs = {(t.source, t.dest) for t in ran.record.transfers}
    unit_pairs = {("p", "d"), ("q", "e")}
    assert pairs == unit_pairs if units is UNITS else pairs <= {*unit_pairs, ("p", "e"), ("q", "d")}
    if not pages:
        assert all(ran.decoded(name) == 0 for name in "pq")


@pytest.mark.parametrize(
    ("order", "dispatch"),
    [("sjf", "two_choices"), ("fcfs", "ratio"), ("ljf", "random"), ("sjf", "imbalance")],
)
def test_tetriinfer(
    four: LLM, expected: dict[str, list[Done]], order: str, dispatch: str, tmp_path: Path
) -> None:
    """Idle prefill instances flip as soon as there are only decodes."""
    system = {
        "name": "tetriinfer",
        "prefill": ["p", "q"],
        "decode": ["d", "e"],
        "prefill_batch": 3,
        "order": order,
        "dispatch": dispatch,
        "heavy_decode": 30,
        "report_s": 0.002,
        "flip_after_s": 0.004,
    }
    ran, done = run(four, system, tmp_path, {"d": 12})
    assert done == expected["two"]
    flips = ran.record.run["system_report"]["flips"]
    assert flips


@pytest.mark.parametrize("pages", [{}, {"d": 5, "e": 18}], ids=["roomy", "small"])
@pytest.mark.parametrize(("limit", "layerwise"), [(8192, 33), (60, None)], ids=["pools", "mixed"])
def test_splitwise(
    four: LLM,
    expected: dict[str, list[Done]],
    limit: int,
    layerwise: int | None,
    pages: dict[str, int],
    tmp_path: Path,
) -> None:
    """Machines help out in the mixed pool if there is room for few prompts or few decodes."""
    system = {
        "name": "splitwise",
        "prompt": ["p", "q"],
        "token": ["d", "e"],
        "max_pending_tokens": limit,
        "layerwise_from": layerwise,
    }
    ran, done = run(four, system, tmp_path, pages)
    assert done == expected["two"]
    moves = ran.record.run["system_report"]["pools"]
    assert {name: where[0][1] for name, where in moves.items()} == {
        "p": "prompt",
        "q": "prompt",
        "d": "token",
        "e": "token",
    }
    helped = {name for name, where in moves.items() if len(where) > 1}
    assert bool(helped) == (limit == 60 or bool(pages))
    if not helped:
        assert ran.decoded("p") == ran.decoded("q") == 0
        assert {t.source for t in ran.record.transfers} == {"p", "q"}


def test_hexgen2(four: LLM, expected: dict[str, list[Done]], tmp_path: Path) -> None:
    """Tokens are the same over stages of 1 + 3 layers, one device and two, to one and two."""
    flows = {"p": {"d": 3.0, "e": 1.0}, "q": {"e": 2.0}}
    system = {"name": "hexgen2", "flows": flows, "max_in_prefill": 100}
    ran, done = run(four, system, tmp_path, {})
    assert done == expected["two"]
    pairs = Counter((t.source, t.dest) for t in ran.record.transfers)
    assert set(pairs) == {("p", "d"), ("p", "e"), ("q", "e")}
    assert all(ran.decoded(name) == 0 for name in "pq")
    share = 6 / sum(pairs.values())
    for (source, dest), count in pairs.items():
        assert abs(count * share - flows[source][dest]) <= share


PLANNED = Path(__file__).parents[2] / "configs" / "cpu" / "hexgen2.yaml"


def planned(layers: int) -> dict[str, Any]:
    """Groups, instances and system of the run file that was planned, not slowed down.

    Args:
        layers: of the model that takes the place of its own.
    """
    data = yaml.safe_load(PLANNED.read_text())
    for instance in data["instances"].values():
        stages, left = instance["stages"], layers
        for number, stage in enumerate(stages):
            after = len(stages) - number - 1
            share = round(stage["layers"] * layers / 30)
            stage["layers"] = min(max(share, 1), left - after) if after else left
            left -= stage["layers"]
    groups = {name: {} for name in data["groups"]}
    return {"groups": groups, "instances": data["instances"], "system": data["system"]}


@pytest.mark.slow
def test_hexgen2_as_planned_for_a_cpu(
    loader: Loader, expected: dict[str, list[Done]], tmp_path: Path
) -> None:
    """The groups, stages and flows of configs/cpu/hexgen2.yaml, on a model of four layers."""
    given = planned(LAYERS)
    flows = given["system"]["flows"]
    llm = loader.load("two", verify_transfers=True, **given)
    ran, done = run(llm, given["system"] | {"max_in_prefill": 100}, tmp_path, {})
    assert done == expected["two"]
    pairs = Counter((t.source, t.dest) for t in ran.record.transfers)
    assert set(pairs) <= {(source, dest) for source, row in flows.items() for dest in row}
    assert all(ran.decoded(name) == 0 for name in flows)
    whole = sum(rate for row in flows.values() for rate in row.values())
    for (source, dest), count in pairs.items():
        assert abs(count - sum(pairs.values()) * flows[source][dest] / whole) <= 1


@pytest.mark.parametrize("prefill", [[], ["p"]], ids=["whole", "split"])
def test_aladdin(
    four: LLM,
    expected: dict[str, list[Done]],
    prefill: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Step times let about 300 entries fit on each instance: the fifth request opens another."""
    fit = StepFit(PrefillFit(1e-4, 0.01), MixedFit(0.0, 0.0, 0.01), DecodeFit(0.005, 0.01, 0.1))
    monkeypatch.setattr(four._runs, "fits", dict.fromkeys(INSTANCES, fit))
    system = {
        "name": "aladdin",
        "ttft_s": 60.0,
        "atgt_s": 2.0,
        "heartbeat_s": 0.002,
        "prefill": prefill,
    }
    ran, done = run(four, system, tmp_path, {})
    assert done == expected["two"]
    used = {name for name in INSTANCES if ran.decoded(name)}
    assert len(used) > 1
    assert {t.source for t in ran.record.transfers} == set(prefill)
    assert not used & set(prefill)
