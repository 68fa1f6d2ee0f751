"""Splitwise's results on the modelled cluster, beside the paper's and its public simulator's.

    python -m scripts.reproduce.splitwise.targets --perf-model CSV --conversation CSV --coding CSV \
        --anchors FOLDER --out DIR

``--perf-model``: the authors' measurements (perf_model.csv); the traces: Azure's of 2023;
``--anchors``: summaries that their simulator has written on the first 1,000 conversations. Some
hours of CPU. Each part's figures are written when they are there, and a part whose table is in DIR
already is read from it: a killed run goes on.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from jaxinfer.pool import process_pool
from jaxinfer.workload.lengths import read_workload
from scripts.reproduce.claims import Target, by_amount, by_share, holds
from scripts.reproduce.splitwise.alone import anchor_targets, anchors, table_iv, transfers
from scripts.reproduce.splitwise.capacities import (
    KINDS,
    Rows,
    Setting,
    batch_jobs,
    capacities,
    design,
    headline,
    of_llama,
    others,
    sensitivities,
)
from scripts.reproduce.splitwise.pictures import draw_capacities, draw_decodes, draw_pools
from scripts.reproduce.splitwise.public import Public
from scripts.tables import show_table, write_csv


def batch_targets(rows: Rows) -> list[Target]:
    """Section VI-E."""
    paper = {"A100": 0.89, "AA": 0.89, "H100": 0.75, "HH": 0.75}
    return [
        by_share(f"batch jobs, {row['cluster']}: RPS/$", paper[row["cluster"]],
                 row["rps_by_usd"], 0.03)
        for row in rows
    ]  # fmt: skip


def other_targets(rows: Rows, at_home: Mapping[str, int]) -> list[Target]:
    """Of these."""
    found = {(row["case"], row["cluster"]): row["rps"] for row in rows}
    targets = []
    for name, theirs in (("AA", 0), ("HH", 0), ("HA", -7), ("HHcap", -7)):
        change = found["conv on the code cluster", name] / at_home[name] - 1
        targets.append(
            by_amount(f"conv on the code cluster, {name}: %", theirs, 100 * change, 4, "points")
        )
    slow = found["code, links of 20 GiB/s", "AA"]
    conv = found["conv, links of 20 GiB/s", "AA"]
    targets.append(
        holds(
            "a tenth of the bandwidth is still beneficial",
            "a guess there",
            f"conv AA {conv}, code AA {slow} RPS",
            slow > 0 and conv > 0,
            "carries something, in both",
        )
    )
    return targets


def llama_target(rows: Rows) -> Target:
    """Of these."""
    found = {row["cluster"]: row["rps"] for row in rows}
    above = min(found[name] for name in KINDS) > max(found["A100"], found["H100"])
    said = ", ".join(f"{name} {rate}" for name, rate in found.items())
    return holds(
        "Llama 2 70B on BLOOM's clusters",
        "all Splitwise above both baselines",
        said,
        above,
        "so",
    )


# What is printed, written and drawn.


def by_cluster(
    rows: Sequence[Mapping[str, Any]], decodes: str
) -> dict[tuple[str, str], dict[str, int]]:
    """By trace and what is equal, of each cluster."""
    found: dict[tuple[str, str], dict[str, int]] = {}
    for row in rows:
        if row["decodes"] == decodes:
            found.setdefault((row["trace"], row["equal"]), {})[row["cluster"]] = row["rps"]
    return found


def ratios(rows: Sequence[Mapping[str, Any]], long: Mapping[str, int]) -> list[Target]:
    """Section VI's, by the public reading of decode times."""
    found = by_cluster(rows, "public")
    conv, code = (
        found[trace, "cost"]["AA"] / found[trace, "cost"]["H100"] for trace in ("conv", "code")
    )
    ha, h100 = design("HA", "conv", "power"), design("H100", "conv", "power")
    cost, power = ha.usd_per_hour / h100.usd_per_hour - 1, ha.power / h100.power - 1
    return [
        by_share("AA / A100, conv, iso-power", 2.15, long["AA"] / long["A100"], 0.1),
        by_share("HA / H100, conv, iso-power", 1.18, long["HA"] / long["H100"], 0.1),
        by_amount("HA's cost beside H100's, %, by Table I", -10, 100 * cost, 3, "points", "input"),
        by_amount("HA's power beside H100's, %", 0, 100 * power, 1, "points", "input"),
        holds(
            "AA / H100, iso-cost", "1.4, in the text",
            f"conv {conv:.2f}, code {code:.2f}", conv <= 1.4 <= code,
            "from that of conv to that of code",
        ),
    ]  # fmt: skip


def by_line(rows: Rows) -> Rows:
    """A line for each trace, what is equal and the decode times, a column for each cluster."""
    lines: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in rows:
        key = row["trace"], row["equal"], row["decodes"]
        line = lines.setdefault(key, dict(zip(("trace", "equal", "decodes"), key, strict=True)))
        line[row["cluster"]] = row["rps"]
    return list(lines.values())


def show(title: str, rows: Rows, path: Path | None = None) -> None:
    """As a table, and in a file."""
    print(f"\n{title}")
    show_table(rows)
    sys.stdout.flush()
    if path:
        write_csv(path, rows)


@click.command()
@click.option("--perf-model", required=True, type=click.Path(path_type=Path))
@click.option("--conversation", required=True)
@click.option("--coding", required=True)
@click.option("--anchors", "summaries", required=True, type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path))
def main(
    perf_model: Path,
    conversation: str,
    coding: str,
    summaries: Path,
    out: Path,
) -> None:
    """Print the paper's figures beside ours, and write them."""
    out.mkdir(parents=True, exist_ok=True)
    claims: list[Target] = []

    def claim(targets: list[Target]) -> None:
        claims.extend(targets)
        write_targets(out / "targets.csv", Path(__file__).name, claims)

    with TemporaryDirectory() as files, process_pool() as pool:
        public = Public(perf_model, Path(files))
        traces = {"conv": read_workload(conversation), "code": read_workload(coding)}
        setting = Setting(public, traces, pool)
        found = anchors(public, traces["conv"], summaries)
        claim(anchor_targets(found))
        found = [{k: v for k, v in row.items() if k != "share"} for row in found]
        show("The public simulator's runs", found, out / "anchors.csv")
        moved, targets = transfers(public)
        claim(targets + table_iv(public))
        show(
            "Transfers of a median coding prompt",
            [{k: v for k, v in row.items() if k not in ("share", "e2e")} for row in moved],
        )
        draw_decodes(public, out / "decodes.png")
        draw_pools(public, design("HA", "code", "power"), traces["code"], out / "pools.png")
        rows = kept(out / "capacities.csv", lambda: capacities(setting))
        show("Largest rates, requests per second", by_line(rows))
        draw_capacities(rows, out / "capacities.png")
        near = by_cluster(rows, "public")["conv", "power"]
        long = kept(out / "headline.csv", lambda: headline(setting, near))
        show("With 600 s of conversations", long)
        claim(ratios(rows, {row["cluster"]: row["rps"] for row in long}))
        claim(batch_targets(kept(out / "batch_jobs.csv", lambda: batch_jobs(setting))))
        rows = kept(out / "others.csv", lambda: others(setting, near))
        show("Other work, other links", rows)
        claim(other_targets(rows, near))
        rows = kept(out / "sensitivities.csv", lambda: sensitivities(setting, near))
        show("Sensitivities", rows)
        rows = kept(out / "llama.csv", lambda: of_llama(setting))
        show("Llama 2 70B on BLOOM's clusters", rows)
        claim([llama_target(rows)])
    print("\nTargets")
    show_targets(claims)


if __name__ == "__main__":
    main()
