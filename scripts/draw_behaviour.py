"""Draw each instance of a finished run over time: its steps, pages and role.

    python scripts/draw_behaviour.py RUN --out FILE.png

RUN is a run's folder, such as ``runs/splitwise/1``. Each instance gets a panel. It shows the used
pages and all pages. If the system changes roles (Splitwise's pools, TetriInfer's flips), the time
in which an instance has another role than at the start is grey.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from jaxinfer.report.pictures import save_picture
from jaxinfer.report.plots import KINDS
from jaxinfer.report.records import read_lines


def kind_of(step: Mapping[str, Any]) -> str:
    """Return the name of a step's kind, as in timelines."""
    if not step["prefill_tokens"]:
        return "decode"
    return "mixed" if step["decode_tokens"] else "prefill"


def moves(report: Mapping[str, Any], name: str) -> list[tuple[float, str]]:
    """Return when each role of an instance began, by the system's report; empty with one role."""
    if name in report.get("pools", {}):
        return [(time, where) for time, where in report["pools"][name]]
    flips = [(f["asked"], f["role"]) for f in report.get("flips", ()) if f["instance"] == name]
    return [(0.0, ""), *flips] if flips else []


def away(found: list[tuple[float, str]], end: float) -> Iterator[tuple[float, float, str]]:
    """Yield the spans in which an instance had another role than at the start, and that role."""
    ends = [*(time for time, _ in found[1:]), end][: len(found)]
    for (start, role), stop in zip(found, ends, strict=True):
        if role != found[0][1] and stop > start:
            yield start, stop, role


def draw(folder: Path, path: Path) -> None:
    """Draw a panel for each instance."""
    lines = read_lines(folder)
    instances, wall = lines.run["instances"], lines.run["metrics"]["wall_s"]
    figure = Figure((10, 0.8 + 1.15 * len(instances)), layout="constrained")
    axes = figure.subplots(len(instances), 1, squeeze=False, sharex=True)[:, 0]
    shown: dict[str, Patch] = {}
    for ax, (name, about) in zip(axes, instances.items(), strict=True):
        steps = [step for step in lines.steps if step["instance"] == name]
        pages = sum(stage["num_pages"] for stage in about["stages"])
        for kind, (_, colour) in KINDS.items():
            spans = [(s["start"], s["end"] - s["start"]) for s in steps if kind_of(s) == kind]
            ax.broken_barh(spans, (-0.35, 0.25), color=colour, lw=0)
            shown |= {kind: Patch(color=colour, label=KINDS[kind][0])} if spans else {}
        ax.step(
            [step["start"] for step in steps],
            [step["pages_in_use"] / pages for step in steps],
            where="post",
            color="black",
            lw=1,
        )
        for start, stop, role in away(moves(lines.run["system_report"], name), wall):
            ax.axvspan(start, stop, color="0.85", lw=0, zorder=0)
            ax.text(start, 1.02, role, fontsize=7, va="bottom")
            shown["role"] = Patch(color="0.85", label="has another role")
        ax.set(xlim=(0, wall), ylim=(-0.4, 1.05))
        ax.set_yticks((0, 1), ("0 %", "100 %"))
        busy = 100 * sum(step["end"] - step["start"] for step in steps) / wall
        said = f"busy for {min(busy, 100):.0f} % of the run" if steps else "never used"
        ax.set_title(f"{name}: {said}", loc="left", fontsize=9)
        ax.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("time (s)")
    pages_line = Line2D([], [], color="black", lw=1, label="KV pages in use")
    figure.legend(
        handles=[pages_line, *shown.values()],
        loc="outside lower center",
        ncols=5,
        frameon=False,
        fontsize="small",
    )
    save_picture(figure, path)


@click.command()
@click.argument("run", type=click.Path(exists=True, path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Picture.")
def main(run: Path, out: Path) -> None:
    """Draw the finished run in folder RUN."""
    draw(run, out)


if __name__ == "__main__":
    main()
