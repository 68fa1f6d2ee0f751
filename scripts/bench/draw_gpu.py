"""Draw measurements of a GPU: attention next to peers, and the parts of a step.

    python -m scripts.bench.draw_gpu docs/results/gpu --out docs/results/gpu/h100.png

The folder has ``kernels.json``, ``flex.json`` and ``engine.json`` of ``gpu_suite.sh``.
"""

import json
from pathlib import Path
from typing import Any

import click
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxinfer.report.pictures import save_picture

OURS, PEERS = "tab:blue", "tab:gray"
PARTS = {
    "matmuls": "tab:blue",
    "attention": "tab:orange",
    "rest": "tab:gray",
    "host": "tab:red",
}
# Names of peers. A peer without a mask computes more, and is only in tables.
NAMES = {"contiguous": "cuDNN, contiguous", "flex_attention": "torch's flex_attention"}
LEFT_OUT = ("contiguous, unmasked",)


def attention(ax: Axes, case: str, runs: dict[str, Any], rate: str) -> None:
    """Draw milliseconds of each implementation, ours first, and shares of the machine's rate."""
    named = [name for name, run in runs.items() if "seconds" in run and name not in LEFT_OUT]
    for y, name in enumerate(reversed(named)):
        run = runs[name]
        ours = name.split(",")[0] in ("generic", "hopper")
        ax.barh(y, 1000 * run["seconds"], color=OURS if ours else PEERS)
        said = f" {1000 * run['seconds']:.2f}, {run['of_the_machine']:.0%}"
        ax.text(1000 * run["seconds"], y, said, va="center", fontsize=7)
    ax.set_yticks(range(len(named)), [NAMES.get(name, name) for name in reversed(named)])
    ax.tick_params(labelsize=7)
    ax.set_title(f"{case} (% of {rate})", fontsize=9)
    ax.set_xlabel("ms", fontsize=8)
    ax.margins(x=0.25)


def steps(ax: Axes, figures: dict[str, Any]) -> None:
    """Draw the parts of the engine's steps, each next to its roofline."""
    for y, (kind, found) in enumerate(figures["step_time"].items()):
        left = 0.0
        for part, colour in PARTS.items():
            label = part if not y else None
            ax.barh(2 * y, 1000 * found[part], left=left, color=colour, label=label)
            left += 1000 * found[part]
        ax.barh(2 * y + 0.85, 1000 * found["roofline_s"], color="none", ec="black", hatch="//")
        said = f"{kind}:\n{found['tokens']:.0f} tokens, {found['decodes']:.0f} decodes"
        ax.text(left, 2 * y, f" {left:.1f} ms", va="center", fontsize=7)
        ax.text(1000 * found["roofline_s"], 2 * y + 0.85, " roofline", va="center", fontsize=7)
        ax.text(-1, 2 * y + 0.4, said, ha="right", va="center", fontsize=7)
    ax.set_yticks([])
    ax.tick_params(labelsize=7)
    ax.set_title("steps of Llama 3 8B's shape, bfloat16", fontsize=9)
    ax.set_xlabel("ms", fontsize=8)
    ax.margins(x=0.2)
    ax.legend(fontsize=7)


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The picture.")
def main(folder: Path, out: Path) -> None:
    """Draw the measurements of the folder."""
    read = {
        name: json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("kernels", "flex", "engine")
    }
    figure = Figure(figsize=(11, 8), layout="constrained")
    axes = figure.subplot_mosaic("ab;cd;ee")
    for name, (case, found) in zip("abcd", read["kernels"].items(), strict=True):
        flex = read["flex"].get(case, {"runs": {}})["runs"].get("flex_attention")
        runs = found["runs"] | ({"flex_attention": flex} if flex else {})
        rate = "products" if case.startswith("chunk") else "copies"
        attention(axes[name], case, runs, rate)
    steps(axes["e"], read["engine"])
    save_picture(figure, out)


if __name__ == "__main__":
    main()
