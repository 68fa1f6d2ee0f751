"""A picture of systems by load."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from jaxinfer.report.plots import COLOURS
from scripts.reproduce.prefixes.runs import CLUSTERS, LOADS, SYSTEMS
from scripts.tables import Row

_PANELS = (
    ("hit_rate", "prompt tokens from caches, %", 100.0, False),
    ("ttft_p50", "TTFT p50, s", 1.0, True),
    ("ttft_p99", "TTFT p99, s", 1.0, True),
)


def draw(rows: Sequence[Row]) -> Figure:
    """Draw hit rate and TTFT of each system over the load, a column for each cluster."""
    figure = Figure((9.0, 8.0), layout="constrained")
    axes = figure.subplots(len(_PANELS), len(CLUSTERS), squeeze=False)
    for column, cluster in enumerate(CLUSTERS):
        for row, (name, label, scale, is_log) in enumerate(_PANELS):
            ax = axes[row][column]
            for system, colour in zip(SYSTEMS, COLOURS, strict=False):
                here = {
                    float(each["load"]): scale * float(each[name])
                    for each in rows
                    if (each["cluster"], each["system"]) == (cluster, system)
                }
                shares, values = [100 * load for load in LOADS], [here[load] for load in LOADS]
                ax.plot(shares, values, "o-", ms=4, lw=1.3, color=colour, label=system)
            ax.set(xlabel="load, % of the instances' rates without caches", ylabel=label)
            ax.grid(alpha=0.3)
            if is_log:
                ax.set_yscale("log")
            if not row:
                ax.set(title=cluster, ylim=(0, None))
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure
