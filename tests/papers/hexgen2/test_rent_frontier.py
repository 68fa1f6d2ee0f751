"""scripts/reproduce/hexgen2/frontier.py: what budgets buy, against all counts that they pay for."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from placement_cases import A100, H100, site_of

from jaxinfer.errors import JaxinferError
from scripts.reproduce.hexgen2 import frontier as rent_frontier

ENGINE = {"page_size": 16, "enable_prefix_caching": False, "launch_ahead": False}


def plan_file(folder: Path, usd: dict[str, float | None], name: str = "hexgen2") -> str:
    """Nodes of four GPUs: two of H100s, one of A100s, each at a price of its own."""
    site = site_of({"x": (H100, 4), "y": (H100, 4), "a": (A100, 4)})
    data = site.hardware.model_dump(mode="json", exclude_none=True)
    for node, price in usd.items():
        data["nodes"][node]["usd_per_hour"] = price
    hardware = folder / "hardware.yaml"
    hardware.write_text(yaml.safe_dump(data))
    problem: dict[str, Any] = {
        "planner": {"name": name, "decode": {"max_num_seqs": 32}, "most_gpus": 2},
        "goal": {"maximise": "cluster", "slo": "ttft=1"},
        "run": {
            "model": "opt-30b",
            "engine": ENGINE,
            "simulate": {"hardware": str(hardware), "reserve_gb": 1.0, "step_s": 0.02},
            "workload": {"synthetic": {"lengths": "chat_1m_4k", "count": 50}},
        },
    }
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump(problem))
    return str(path)


def test_what_budgets_buy(tmp_path: Path) -> None:
    path = plan_file(tmp_path, {"x": 16.0, "y": 12.0, "a": 6.0})
    *rented, there = rent_frontier.frontier(path, [6.0, 12.0, 1000.0], most=8)
    flows = [row["requests/s"] for row in rented]
    assert flows == sorted(flows)
    # Three dollars an H100, where it is cheapest; half of that an A100.
    for row, budget in zip(rented, (6.0, 12.0, 1000.0), strict=True):
        assert row["$/h"] == pytest.approx(3.0 * row[H100] + 1.5 * row[A100])
        assert row["$/h"] <= budget
        assert row["requests/s"] <= row["at most"] * 1.001
    assert (there[H100], there[A100]) <= (8, 4)
    # More of both, and no dearer than the budget: as much at least.
    assert flows[-1] >= there["requests/s"]


def test_what_it_refuses(tmp_path: Path) -> None:
    path = plan_file(tmp_path, {"a": None})
    with pytest.raises(JaxinferError, match="node a of the hardware file has no usd_per_hour"):
        rent_frontier.frontier(path, [6.0], most=2)
    with pytest.raises(JaxinferError, match="must be hexgen2"):
        rent_frontier.frontier(
            path, [6.0], most=2, settings=["planner={name: colocated, gpus: {H100-SXM: 1}}"]
        )
