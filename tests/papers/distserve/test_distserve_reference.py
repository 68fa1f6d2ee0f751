"""DistServe simulated: beside its simulator's rules, written anew, and its authors' own figures."""

import csv
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import yaml

from jaxinfer.config.run_file import RunFile, as_run_file, load_run_file
from jaxinfer.serving.request_state import RequestState
from jaxinfer.simulate.run import simulate
from jaxinfer.workload.lengths import BenchRequest, read_workload
from scripts.reproduce.distserve import reference

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "configs" / "distserve"


def requests(rate: float, count: int = 300) -> list[BenchRequest]:
    work = read_workload(FOLDER / "table2_requests.csv")[:count]
    scale = count / rate / work[-1].arrival
    return [BenchRequest(None, w.prompt_len, w.max_tokens, w.arrival * scale) for w in work]


def latencies(config: RunFile, work: Sequence[BenchRequest]) -> list[tuple[float, float]]:
    found: dict[int, tuple[float, float]] = {}

    def note(request: RequestState, times: Sequence[float]) -> None:
        per_token = (times[-1] - times[0]) / max(len(times) - 1, 1)
        found[int(request.id)] = times[0] - request.arrival, per_token

    simulate(config, work, on_request=note)
    return [found[number] for number in range(len(work))]


def ours(work: Sequence[BenchRequest]) -> list[tuple[float, float]]:
    return latencies(load_run_file(FOLDER / "opt_13b.yaml"), work)


def phases(group: str) -> dict[str, Any]:
    costs = load_run_file(FOLDER / "opt_13b.yaml").simulate.groups[group].phases
    assert costs
    return costs.model_dump()


def share(found: Sequence[tuple[float, float]]) -> float:
    return fmean(first <= 0.2 and each <= 0.1 for first, each in found)


@pytest.fixture(autouse=True)
def in_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("rate", [3, 6])
def test_as_its_simulator(rate: float) -> None:
    """First tokens to the last digits; per token, but for the transfers that it has none of."""
    work = requests(rate)
    found, theirs = ours(work), reference.disaggregated(work, phases("two"), phases("one"))
    assert [f for f, _ in found] == pytest.approx([f for f, _ in theirs], abs=1e-9)
    assert share(found) == pytest.approx(share(theirs), abs=0.02)
    long = [n for n, item in enumerate(work) if item.max_tokens > 50]
    assert [found[n][1] for n in long] == pytest.approx([theirs[n][1] for n in long], rel=0.08)


def test_colocated_as_its_simulator() -> None:
    """Latencies equal the reference simulator's to the last digits while the pool does not fill."""
    work = requests(1, 100)
    data = yaml.safe_load((FOLDER / "opt_13b.yaml").read_text())
    data |= {"groups": {"one": data["groups"]["one"]}, "system": "single"}
    one = {"group": "one", "num_pages": 4135, "policies": {"batching": "prefill_first"}}
    data["instances"] = {"one": one}
    del data["simulate"]["groups"]["two"]
    found = latencies(as_run_file(data), work)
    theirs = reference.colocated(work, phases("one"))
    for mine, other in zip(found, theirs, strict=True):
        assert mine == pytest.approx(other, abs=1e-9)


def test_as_measured_by_its_authors() -> None:
    """The first 66 requests that ended at 9 per second, on three A100s; nothing is fitted."""
    with (FOLDER / "measured_requests.csv").open() as file:
        real = {
            (int(row["num_prefill_tokens"]), int(row["num_decode_tokens"])): (
                float(row["ttft_ms"]) / 1e3,
                float(row["tpot_ms"]) / 1e3,
            )
            for row in csv.DictReader(file)
        }
    work = requests(9)
    lengths = [(item.prompt_len, item.max_tokens) for item in work]
    mine = dict(zip(lengths, ours(work), strict=True))
    simulated = [mine[key] for key in real]
    measured = list(real.values())
    assert len(measured) == 66
    for which in (0, 1):
        mean = fmean(each[which] for each in measured)
        assert fmean(each[which] for each in simulated) == pytest.approx(mean, rel=0.1)
    assert share(simulated) == pytest.approx(share(measured), abs=0.02)
