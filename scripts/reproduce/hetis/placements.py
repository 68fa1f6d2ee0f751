"""Hetis' figures on the modelled cluster, beside the paper's.

    python -m scripts.reproduce.hetis.placements --out DIR [--data FOLDER]

Of the paper's text all multipliers but two are lost (2.25 times the throughput, 1.49 times lower
latency, both from its abstract), so that most claims are of order and sign. Lengths are ShareGPT's
and arXiv's, drawn from published quantiles. Nothing is calibrated. ``scripts/reproduce/hetis/cpu.py`` has the
runs that are real.
"""

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import yaml

from jaxinfer.plan.placement.primaries import Rule, groupings, primaries
from jaxinfer.plan.planners.hetis import Hetis, HetisOptions
from jaxinfer.plan.problem import load_problem
from scripts.reproduce.hetis.capacities import capacities, idle_memory
from scripts.reproduce.hetis.dispatch import compared
from scripts.reproduce.hetis.halves import draw_halves, half_runs, halves, thresholds
from scripts.reproduce.hetis.measured import measured
from scripts.reproduce.hetis.offload import courses, offload
from scripts.reproduce.hetis.pictures import draw_burst, draw_capacities, draw_offload
from scripts.reproduce.hetis.runs import redispatch, smaller_models, systems, wrong_figures
from scripts.reproduce.reproduction import CONFIGS
from scripts.reproduce.results import (
    Target,
    holds,
    show_table,
    show_targets,
    write_csv,
    write_targets,
)

Row = dict[str, Any]
# Table 1: seconds of a prefill and a decode on A100-80, 3090 and P100.
PREFILL, DECODE = (0.06, 0.147, 1.47), (0.0097, 0.0143, 0.077)
RULES: tuple[Rule, ...] = ("cumulative", "stepwise")


def placements() -> tuple[list[Row], list[Target]]:
    """Which GPUs keep layers, by Table 1, and the search's size and time."""
    rows: list[Row] = []
    for name, of_kind in (("prefill", PREFILL), ("decode", DECODE)):
        for most in (0.01, 0.03, 0.05, 0.1):
            for rule in RULES:
                left = primaries((4, 4, 4), of_kind, most, rule)
                rows.append({"times": name, "slower by at most": most, "rule": rule,
                             "A100": left[0], "3090": left[1], "P100": left[2]})  # fmt: skip
    seconds, count = search_of_160()
    found = primaries((4, 4, 4), PREFILL, 0.05, "cumulative")
    return rows, [
        holds("A100 and 3090 have layers, P100 none", "4, 4, 0", ", ".join(map(str, found)),
              found == [4, 4, 0], "equal"),
        holds("the planner's candidates for 160 GPUs, 70B, in less than 15 s", "15 s",
              f"{seconds:.2f} s of CPU, {count} groupings looked at", seconds < 15,
              "less than 15 s"),
    ]  # fmt: skip


def search_of_160() -> tuple[float, int]:
    """CPU seconds of the planner's search among five kinds of 32 GPUs, and how many groupings.

    All GPUs keep their layers, so that there are most of them.
    """
    of_prefill = {"H100-SXM": 1.0, "A100-80G-SXM": 2.0, "L40S": 4.0, "RTX-3090": 8.3,
                  "P100-PCIe-12G": 16.7}  # fmt: skip
    nodes = {f"{kind}_{i}": {"gpu": kind, "gpus": 8, "nic_gb_s": 12.5, "link_gb_s": 32}
             for kind in of_prefill for i in range(4)}  # fmt: skip
    problem = load_problem(CONFIGS / "plan" / "hetis.yaml")
    planner = Hetis(HetisOptions(seconds=of_prefill, most_slower=0.0))
    with TemporaryDirectory() as folder:
        hardware = Path(folder) / "hardware.yaml"
        hardware.write_text(yaml.safe_dump({"source": "", "latency_s": 5e-5, "nodes": nodes}))
        problem.run["simulate"]["hardware"] = str(hardware)
        start = time.process_time()
        planner.candidates(problem)
        seconds = time.process_time() - start
    return seconds, len(list(groupings([32] * 5, list(of_prefill.values()), 0.0, "cumulative")))


@click.command()
@click.option("--out", required=True, type=click.Path(path_type=Path))
@click.option(
    "--data", type=click.Path(path_type=Path, exists=True),
    help="Folder with aiconfigurator/ and vidur/network/ for eqs. 3 and 4.",
)  # fmt: skip
def main(out: Path, data: Path | None) -> None:
    """Print all tables, and write them, the pictures and the targets."""
    out.mkdir(parents=True, exist_ok=True)
    found = courses()
    parts: dict[str, Any] = {
        "primaries": placements,
        "capacities": capacities,
        "idle_memory": idle_memory,
        "offload": lambda: offload(found),
        "dispatch": compared,
        "systems": systems,
        "smaller_models": smaller_models,
        "redispatch": redispatch,
        "wrong": wrong_figures,
        "halves": halves,
        "half_thresholds": thresholds,
        "half_runs": half_runs,
    }
    if data:
        parts["measured"] = lambda: measured(data)
    targets: list[Target] = []
    of_data: list[Target] = []
    for name, part in parts.items():
        rows, more = part()
        print(f"\n## {name}\n", flush=True)
        show_table(rows)
        write_csv(out / f"{name}.csv", rows)
        (of_data if name == "measured" else targets).extend(more)
        if name == "capacities":
            draw_capacities(rows, out / "capacities.png")
    draw_offload(found, out / "offload.png")
    draw_burst(out / "heads.png")
    draw_halves(out / "halves.png")
    print("\n## targets\n")
    show_targets([*targets, *of_data])
    write_targets(out / "targets.csv", Path(__file__).name, targets)
    if data:
        write_targets(out / "targets.csv", f"{Path(__file__).name} --data", of_data)


if __name__ == "__main__":
    main()
