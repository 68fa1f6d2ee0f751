"""HexGen-2's Tables 3, 4 and 5 by our planner and simulator, beside the paper's.

    python -m scripts.reproduce.hexgen2.driver --trace CSV --out DIR [--part tables] ...

CSV: Azure's 2023 conversation trace. Each part takes minutes and stands alone; without ``--part``,
all of them.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from jaxinfer.workload.lengths import read_workload
from scripts.reproduce.claims import Target
from scripts.reproduce.hexgen2.regimes import draw_ratios, ratios, regime_targets, regimes
from scripts.reproduce.hexgen2.runs import Clusters
from scripts.reproduce.hexgen2.search import draw_methods, draw_sizes, methods, sizes
from scripts.reproduce.hexgen2.tables import (
    classes,
    distserve,
    draw_tables,
    hexgen,
    latencies,
    step_seconds,
    table_3,
    table_4,
    whole_runs,
)
from scripts.reproduce.reproduction import Work
from scripts.tables import Row, show_table, write_csv


class Report:
    """What a part prints and writes.

    Args:
        out: a folder.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.targets: list[Target] = []

    def add(
        self, title: str, name: str, rows: Sequence[Row], targets: Sequence[Target] = ()
    ) -> Sequence[Row]:
        """One table, and its claims."""
        print(f"\n## {title}\n", flush=True)
        show_table(rows)
        write_csv(self.out / f"{name}.csv", rows)
        self.targets.extend(targets)
        return rows


def tables(trace: Work, clusters: Clusters, report: Report) -> None:
    """Tables 3 and 4, and what they are compared with."""
    report.add("The trace's classes", "classes", classes(trace))
    report.add("The calibrated number", "step_s", step_seconds(trace, clusters))
    four = report.add("Table 4", "table4", *table_4(trace, clusters))
    three = report.add("Table 3, setting 1", "table3", *table_3(trace, clusters))
    draw_tables(three, four, report.out / "tables.png")
    report.add("With ramp and drain", "whole_runs", whole_runs(trace, clusters))
    report.add("DistServe, 8 H100", "distserve", distserve(trace, clusters))
    report.add("HexGen-2 by HexGen, 4 H100", "hexgen", *hexgen(trace, clusters))
    report.add("Online latency", "latency", *latencies(trace, clusters))


def compared(trace: Work, clusters: Clusters, report: Report) -> None:
    """Settings 1 and 5 against eight H100s."""
    rows = report.add("Our plans", "plans", regimes(trace, clusters))
    found = ratios(trace, clusters, rows)
    report.add("By 8 H100", "ratios", found, regime_targets(rows, found))
    draw_ratios(found, report.out / "ratios.png")


def searched(trace: Work, clusters: Clusters, report: Report) -> None:
    """Methods of search."""
    found = report.add("Searches in setting 1", "search", *methods(trace, clusters))
    draw_methods(found, report.out / "search.png")


def timed(trace: Work, clusters: Clusters, report: Report) -> None:
    """How long ours takes."""
    found = report.add("Sizes", "sizes", *sizes(trace, clusters))
    draw_sizes(found, report.out / "sizes.png")


PARTS: dict[str, Callable[[Work, Clusters, Report], None]] = {
    "tables": tables, "regimes": compared, "search": searched,
    "sizes": timed,
}  # fmt: skip


@click.command()
@click.option("--trace", required=True)
@click.option("--out", required=True, type=click.Path(path_type=Path))
@click.option("--part", "parts", multiple=True, type=click.Choice(list(PARTS)))
def main(trace: str, out: Path, parts: Sequence[str]) -> None:
    """Print tables, and write them, their claims and pictures."""
    work = read_workload(trace)
    out.mkdir(parents=True, exist_ok=True)
    for name in parts or PARTS:
        report = Report(out)
        with TemporaryDirectory() as folder:
            PARTS[name](work, Clusters(Path(folder)), report)
        print(f"\n## Targets, {name}\n")
        show_targets(report.targets)
        made_by = f"{Path(__file__).name} --part {name}"
        write_targets(out / "targets.csv", made_by, report.targets)


if __name__ == "__main__":
    main()
