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

OURS, PEERS, ROOFLINE = "tab:blue", "tab:gray", "black"
# Parts of a step, with colours and names.
PARTS = {
    "matmuls": ("tab:blue", "matrix products"),
    "attention": ("tab:orange", "attention"),
    "rest": ("tab:gray", "rest"),
    "host": ("tab:red", ""),
}
# Names of the drawn implementations. Contexts of 8 bits and a peer without a mask are only in
# tables.
NAMES = {
    "hopper": "hopper (ours)",
    "generic": "generic (ours)",
    "jax's": "JAX's paged attention",
    "contiguous": "cuDNN, contiguous KV",
    "flex_attention": "torch's flex_attention",
    "plain": "plain JAX",
}
# What the cases are called in titles, and the machine's rate that limits each.
CASES = {
    "decode 64 x 4096": ("64 decodes after 4,096 tokens each", "copy"),
    "decode 4 x 65536": ("4 decodes after 65,536 tokens each", "copy"),
    "decode 64 of 50 to 8192": ("64 decodes after 50 to 8,192 tokens", "copy"),
    "chunk of 2048 after 8192": ("2,048 tokens of a prompt after 8,192", "product"),
}
STEPS = {"with prefill": "step with prompts", "decodes": "step of decodes"}


def fastest(runs: dict[str, Any]) -> dict[str, Any]:
    """Return the run of each drawn implementation; of JAX's numbers of pages, the fastest."""
    found: dict[str, Any] = {}
    for name in NAMES:
        own = [run for key, run in runs.items() if key == name or key.startswith(f"{name}, ")]
        own = [run for run in own if "seconds" in run]
        if name != "jax's":
            own = [runs[name]] if "seconds" in runs.get(name, {}) else []
        if own:
            found[name] = min(own, key=lambda run: run["seconds"])
    return found


def attention(ax: Axes, case: str, runs: dict[str, Any]) -> None:
    """Draw milliseconds of each implementation, ours first, and shares of the machine's rate."""
    shown = fastest(runs)
    words, rate = CASES[case]
    for y, (name, run) in enumerate(reversed(shown.items())):
        ms = 1000 * run["seconds"]
        ax.barh(y, ms, color=OURS if name in ("hopper", "generic") else PEERS)
        said = f" {ms:.2f} ms, {run['of_the_machine']:.0%} of the {rate} rate"
        ax.text(ms, y, said, va="center", fontsize=8)
    ax.set_yticks(range(len(shown)), [NAMES[name] for name in reversed(shown)])
    ax.tick_params(labelsize=8)
    ours = min(shown[name]["seconds"] for name in ("hopper", "generic"))
    peers = min(run["seconds"] for name, run in shown.items() if name not in ("hopper", "generic"))
    finding = f"{words}:\nours takes {ours / peers:.2f} of the fastest peer's time"
    ax.set_title(finding, fontsize=10, loc="left")
    ax.set_xlabel("ms", fontsize=8)
    ax.margins(x=0.65)
    ax.spines[["top", "right"]].set_visible(False)


def steps(ax: Axes, figures: dict[str, Any]) -> None:
    """Draw the parts of the engine's steps, each next to its roofline."""
    ratios = []
    for y, (kind, found) in enumerate(figures["step_time"].items()):
        left = 0.0
        for part, (colour, name) in PARTS.items():
            ms = 1000 * found[part]
            ax.barh(2 * y, ms, left=left, color=colour)
            said = f"{name}\n{ms:.1f}" if ms > 4 else ""
            ax.text(left + ms / 2, 2 * y, said, ha="center", va="center", fontsize=8, color="white")
            left += ms
        roofline = 1000 * found["roofline_s"]
        ax.barh(2 * y + 0.85, roofline, color="none", ec=ROOFLINE, hatch="//")
        words = f"{STEPS[kind]}:\n{found['tokens']:,.0f} tokens, of which\n"
        words += f"{found['decodes']:.0f} are decodes"
        ax.text(left, 2 * y, f" {left:.1f} ms", va="center", fontsize=8)
        ax.text(roofline, 2 * y + 0.85, f" roofline, {roofline:.1f} ms", va="center", fontsize=8)
        ax.text(-0.5, 2 * y + 0.4, words, ha="right", va="center", fontsize=8)
        ratios.append(f"{found['step_s'] / found['roofline_s']:.2f}")
    ax.set_yticks([])
    ax.tick_params(labelsize=8)
    finding = f"Steps of Llama 3 8B's shape take {' and '.join(ratios)} times their roofline"
    ax.set_title(f"{finding} (bfloat16)", fontsize=10, loc="left")
    ax.set_xlabel("ms; red: host", fontsize=8)
    ax.margins(x=0.2)
    ax.spines[["top", "right"]].set_visible(False)


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
        attention(axes[name], case, found["runs"] | ({"flex_attention": flex} if flex else {}))
    steps(axes["e"], read["engine"])
    save_picture(figure, out)


if __name__ == "__main__":
    main()
