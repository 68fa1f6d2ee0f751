"""Hetis' primaries compared with Table 1, and the time of its search."""

import time
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from jaxinfer.lab.plan.problem import load_problem
from jaxinfer.papers.hetis.planner import HetisPlanner, HetisPlannerOptions
from jaxinfer.papers.hetis.primaries import ShareRule, groupings, primaries
from scripts.reproduce.claims import agrees, holds
from scripts.reproduce.reproduction import Inputs, Part
from scripts.tables import CONFIGS, Row

# Table 1: seconds of a prefill and a decode on A100-80, 3090 and P100.
PREFILL, DECODE = (0.06, 0.147, 1.47), (0.0097, 0.0143, 0.077)
RULES: tuple[ShareRule, ...] = ("cumulative", "stepwise")


def placements(inputs: Inputs) -> Part:
    """GPUs that keep layers, compared with Table 1, and the search's size and time."""
    rows: list[Row] = []
    for name, of_kind in (("prefill", PREFILL), ("decode", DECODE)):
        for most in (0.01, 0.03, 0.05, 0.1):
            for rule in RULES:
                left = primaries((4, 4, 4), of_kind, most, rule)
                rows.append({"times": name, "slower by at most": most, "rule": rule,
                             "A100": left[0], "3090": left[1], "P100": left[2]})  # fmt: skip
    seconds, count = search_of_160()
    found = primaries((4, 4, 4), PREFILL, 0.05, "cumulative")
    return Part(rows, [
        holds("A100 and 3090 have layers, P100 none", "4, 4, 0", ", ".join(map(str, found)),
              found == [4, 4, 0], "equal"),
        agrees("the planner's candidates for 160 GPUs, 70B (paper: less than 15 s)",
               f"{seconds:.2f} s of CPU, {count} groupings looked at", seconds < 15,
               "less than 15 s"),
    ])  # fmt: skip


def search_of_160() -> tuple[float, int]:
    """Return the CPU seconds of a search among 5 kinds of 32 GPUs, and the number of groupings.

    All GPUs keep their layers, which gives the most groupings.
    """
    of_prefill = {
        "H100-SXM": 1.0,
        "A100-80G-SXM": 2.0,
        "L40S": 4.0,
        "RTX-3090": 8.3,
        "P100-PCIe-12G": 16.7,
    }
    nodes = {
        f"{kind}_{i}": {"gpu": kind, "gpus": 8, "nic_gb_s": 12.5, "link_gb_s": 32}
        for kind in of_prefill
        for i in range(4)
    }
    problem = load_problem(CONFIGS / "plan" / "hetis.yaml")
    planner = HetisPlanner(HetisPlannerOptions(seconds=of_prefill, most_slower=0.0))
    with TemporaryDirectory() as folder:
        hardware = Path(folder) / "hardware.yaml"
        hardware.write_text(yaml.safe_dump({"source": "", "latency_s": 5e-5, "nodes": nodes}))
        problem.run["simulate"]["hardware"] = str(hardware)
        start = time.process_time()
        planner.candidates(problem)
        seconds = time.process_time() - start
    return seconds, len(list(groupings([32] * 5, list(of_prefill.values()), 0.0, "cumulative")))
