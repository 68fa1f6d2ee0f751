"""Searches over a Ray cluster's cores."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from jaxinfer.commands.plan import plan

pytestmark = pytest.mark.slow
FILE = {
    "planner": {
        "name": "colocated",
        "gpus": {"A10": 2, "L4": 2},
        "tensor_parallel": [1, 2],
        "seqs_per_stage": [2, 16],
    },
    "goal": {"maximise": "gpu", "slo": "ttft:p90=2,tbt:p99=0.2", "at_once": 3, "fresh_seeds": 2},
    "run": {
        "model": "llama-3-8b",
        "engine": {"max_model_len": 4096},
        "workload": {"synthetic": {"lengths": "sharegpt", "count": 200, "seed": 0}},
    },
}


def test_a_plan_over_a_cluster_is_that_of_this_machine(cluster: Any, tmp_path: Path) -> None:
    """The table and the run file, byte for byte, and what is kept, line by line."""
    file = tmp_path / "plan.yaml"
    file.write_text(yaml.safe_dump(FILE))
    found = []
    for where, how in (("ray", ["--ray", cluster.address]), ("here", ["--jobs", "1"])):
        out = tmp_path / where
        CliRunner().invoke(plan, [str(file), "--out", str(out), *how], catch_exceptions=False)
        texts = [(out / n).read_text() for n in ("plan.csv", "run.yaml", "evaluations.jsonl")]
        # The last line of a run file tells of its path, too, which is at its head.
        *plain, kept = [text.replace(str(out), "").partition("# sha256")[0] for text in texts]
        found.append([*plain, sorted(kept.splitlines())])  # In the order in which they were found.
    assert found[0] == found[1]
    assert str(found[0][0]).count("\n") == 1 + 2 * 2 * 2
