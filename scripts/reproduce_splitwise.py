"""Splitwise's results on the modelled cluster, beside the paper's and its public simulator's.

    python scripts/reproduce_splitwise.py --perf-model CSV --conversation CSV --coding CSV \
        --anchors FOLDER --out DIR

``--perf-model``: the authors' measurements (perf_model.csv); the traces: Azure's of 2023;
``--anchors``: summaries that their simulator has written on the first 1,000 conversations. Some
fifteen minutes on two cores.
"""

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import click
from matplotlib.figure import Figure
from results import (
    Target,
    by_amount,
    by_share,
    holds,
    show_table,
    show_targets,
    write_csv,
    write_targets,
)
from splitwise_alone import anchor_targets, anchors, table_iv, transfers
from splitwise_public import BLOOM, GB_S, LLAMA, Design, Public, drawn

from jaxinfer.report.plots import COLOURS
from jaxinfer.simulate.capacity import load
from jaxinfer.simulate.curve import Curve
from jaxinfer.simulate.run import simulate
from jaxinfer.workload.arrivals import Arrivals, with_arrivals
from jaxinfer.workload.lengths import BenchRequest, read_workload

Work = Sequence[BenchRequest]
Key = TypeVar("Key")
# Prompts and tokens: machines of the public notebook's splits, by what is equal to 40 DGX-H100.
SPLITS: Mapping[tuple[str, str], Mapping[str, tuple[int, int]]] = {
    ("conv", "power"): {"AA": (45, 25), "HH": (25, 15), "HA": (25, 26), "HHcap": (25, 21)},
    ("conv", "cost"): {"AA": (51, 35), "HH": (25, 15), "HA": (30, 21), "HHcap": (30, 10)},
    ("code", "power"): {"AA": (55, 15), "HH": (35, 5), "HA": (35, 8), "HHcap": (35, 7)},
    ("code", "cost"): {"AA": (66, 20), "HH": (35, 5), "HA": (35, 10), "HHcap": (35, 7)},
}
KINDS = {"AA": ("a100", "a100"), "HH": ("h100", "h100"), "HA": ("h100", "a100"),
         "HHcap": ("h100", "h100_capped")}  # fmt: skip
BASELINES = {"power": {"A100": 70, "H100": 40}, "cost": {"A100": 86, "H100": 40}}
DESIGNS = ("A100", "H100", *KINDS)


def design(name: str, trace: str, equal: str, **changes: Any) -> Design:
    """A cluster of the paper's comparison."""
    if name in BASELINES[equal]:
        return Design(BASELINES[equal][name], name.lower(), **changes)
    (p, t), (here, there) = SPLITS[trace, equal][name], KINDS[name]
    return Design(p, here, t, there, **changes)


@dataclass(frozen=True)
class Search:
    """The largest rate of a grid at which all nine targets hold.

    Attributes:
        seconds, seed: of arrivals.
    """

    public: Public
    trace: Work
    design: Design
    seconds: float = 120
    seed: int = 0
    step: int = 2
    most: int = 160

    def met(self, rate: int) -> bool:
        """At one rate."""
        work = drawn(self.trace, rate, self.seconds, self.seed)
        targets = self.public.targets(self.design.model, work)
        config = self.public.run_file(self.design)
        return load(config, work, targets, (self.seed,), rate).verdict.met

    def largest(self) -> int:
        """By bisection; 0 where the least rate misses."""
        low, high = 0, self.most // self.step + 1
        while high - low > 1:
            middle = (low + high) // 2
            if self.met(middle * self.step):
                low = middle
            else:
                high = middle
        return low * self.step

    def walk(self, start: int) -> int:
        """From near the answer, where each rate takes long."""
        rate = start
        if self.met(rate):
            while self.met(rate + self.step):
                rate += self.step
            return rate
        while rate > 0 and not self.met(rate):
            rate -= self.step
        return rate


@dataclass(frozen=True)
class Setting:
    """The authors' measurements, the traces, and where many simulations run."""

    public: Public
    traces: Mapping[str, Work]
    pool: ProcessPoolExecutor

    def largest(self, cells: Mapping[Key, tuple[str, Design]], **how: Any) -> dict[Key, int]:
        """Of each cell, a trace and a cluster."""
        searches = [Search(self.public, self.traces[t], d, **how) for t, d in cells.values()]
        return dict(zip(cells, self.pool.map(Search.largest, searches), strict=True))


# Capacities.


def capacities(setting: Setting) -> list[dict[str, Any]]:
    """All clusters under both readings of decode times, at equal power and at equal cost."""
    cells = {
        (trace, equal, name, measured): (trace, design(name, trace, equal, measured=measured))
        for trace in ("conv", "code")
        for equal in ("power", "cost")
        for name in DESIGNS
        for measured in (False, True)
        if equal == "power" or not measured
    }
    # Some are the same cluster twice.
    once = {cell: key for key, cell in reversed(cells.items())}
    found = setting.largest({key: cell for cell, key in once.items()})
    return [
        {
            "trace": t, "equal": equal, "cluster": name,
            "decodes": "measured" if measured else "public",
            "machines": "+".join(str(count) for _, count in d.machines),
            "rps": found[once[t, d]],
        }
        for (t, equal, name, measured), (_, d) in cells.items()
    ]  # fmt: skip


def headline(setting: Setting, near: Mapping[str, int]) -> dict[str, int]:
    """The clusters of the paper's ratios again, with 600 s of arrivals."""
    names = ("A100", "AA", "H100", "HA")
    found = setting.pool.map(
        Search.walk,
        [
            Search(setting.public, setting.traces["conv"], design(n, "conv", "power"), 600)
            for n in names
        ],
        [near[name] for name in names],
    )
    return dict(zip(names, found, strict=True))


def per_dollar(public: Public, trace: Work, cluster: Design, gpu_usd: float) -> float:
    """Requests per second of batch jobs by dollars, of one GPU of each machine, per hour.

    At 180 requests per second nobody keeps up; counted is what ends from 60 to 240 seconds.
    """
    work = drawn(trace, 180, 240, 0)
    ended = 0

    def on_request(_: Any, times: Sequence[float]) -> None:
        nonlocal ended
        ended += 60 <= times[-1] < 240

    arrivals = Arrivals(kind="poisson", rate=180, seed=0)
    simulate(public.run_file(cluster), with_arrivals(work, arrivals), on_request=on_request)
    return ended / 180 / gpu_usd


def batch_jobs(setting: Setting) -> list[Target]:
    """Section VI-E."""
    paper = {"A100": 0.89, "AA": 0.89, "H100": 0.75, "HH": 0.75}
    clusters = [design(name, "conv", "power") for name in paper]
    # The notebook's prices of a GPU-hour.
    usd = [
        sum({"a100": 2.21, "h100": 4.76}[kind] * count for kind, count in cluster.machines)
        for cluster in clusters
    ]
    measure = partial(per_dollar, setting.public, setting.traces["conv"])
    found = setting.pool.map(measure, clusters, usd)
    return [
        by_share(f"batch jobs, {name}: RPS/$", value, ours, 0.03)
        for (name, value), ours in zip(paper.items(), found, strict=True)
    ]


def others(setting: Setting) -> tuple[list[dict[str, Any]], list[Target]]:
    """Clusters with work that they were not made for, and slower links."""
    rows, targets = [], []
    moved = {name: ("conv", design(name, "code", "power")) for name in KINDS}
    at_home = {name: ("conv", design(name, "conv", "power")) for name in KINDS}
    cells = {("conv on the code cluster", n): c for n, c in moved.items()}
    cells |= {("conv on its own", n): c for n, c in at_home.items()}
    cells |= {
        ("conv, links of 20 GiB/s", n): ("conv", design(n, "conv", "power", gb_s=GB_S / 10))
        for n in ("AA", "HA")
    }
    cells[("code, links of 20 GiB/s", "AA")] = (
        "code",
        design("AA", "code", "power", gb_s=GB_S / 10),
    )
    found = setting.largest(cells)
    llama = {
        ("Llama 2 70B, conv", n): ("conv", design(n, "conv", "power", model=LLAMA)) for n in DESIGNS
    }
    found |= setting.largest(llama, step=10, most=300)
    rows = [{"case": case, "cluster": name, "rps": rps} for (case, name), rps in found.items()]
    for name, theirs in (("AA", 0), ("HH", 0), ("HA", -7), ("HHcap", -7)):
        change = found["conv on the code cluster", name] / found["conv on its own", name] - 1
        targets.append(
            by_amount(f"conv on the code cluster, {name}: %", theirs, 100 * change, 4, "points")
        )
    of_llama = {name: found["Llama 2 70B, conv", name] for name in DESIGNS}
    above = min(of_llama[n] for n in KINDS) > max(of_llama["A100"], of_llama["H100"])
    said = ", ".join(f"{name} {rate}" for name, rate in of_llama.items())
    targets.append(
        holds("Llama 2 70B on BLOOM's clusters", "all Splitwise above both baselines", said, above)
    )
    slow = found["code, links of 20 GiB/s", "AA"]
    conv = found["conv, links of 20 GiB/s", "AA"]
    targets.append(
        holds(
            "a tenth of the bandwidth is still beneficial",
            "a guess there",
            f"conv AA {conv}, code AA {slow} RPS",
            slow > 0 and conv > 0,
        )
    )
    return rows, targets


def cheapest(setting: Setting) -> Target:
    """Machines that HH needs for coding at 70 RPS, with the three for tokens of Figure 12."""
    least = 0
    for prompts in range(28, 20, -1):
        cluster = Design(prompts, "h100", 3, "h100")
        searches = [
            Search(setting.public, setting.traces["code"], cluster, seed=seed) for seed in range(3)
        ]
        if not all(setting.pool.map(partial(Search.met, rate=70), searches)):
            break
        least = prompts + 3
    return by_amount(
        "HH, code, 70 RPS: machines, three of them for tokens", 30, least, 2, "machines"
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
        ),
    ]  # fmt: skip


def show_capacities(rows: Sequence[Mapping[str, Any]]) -> None:
    """A line for each trace and what is equal, a column for each cluster."""
    lines: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in rows:
        key = row["trace"], row["equal"], row["decodes"]
        line = lines.setdefault(key, dict(zip(("trace", "equal", "decodes"), key, strict=True)))
        line[row["cluster"]] = row["rps"]
    show_table(list(lines.values()))


def draw_capacities(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """At equal power, under both readings."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    for ax, trace in zip(figure.subplots(1, 2), ("conv", "code"), strict=True):
        for number, decodes in enumerate(("public", "measured")):
            here = [
                r
                for r in rows
                if (r["trace"], r["equal"], r["decodes"]) == (trace, "power", decodes)
            ]
            x = [i + 0.4 * number for i in range(len(here))]
            bars = ax.bar(
                x,
                [r["rps"] for r in here],
                0.38,
                color=COLOURS[number],
                label=f"decode times: {decodes}",
            )
            ax.bar_label(bars, fontsize=8)
        ax.set_xticks(
            [i + 0.2 for i in range(len(here))], [f"{r['cluster']}\n{r['machines']}" for r in here]
        )
        ax.set_title(f"{trace}, the power of 40 DGX-H100", fontsize=10)
    figure.axes[0].set_ylabel("requests/s within the targets")
    figure.axes[1].legend(frameon=False)
    figure.savefig(path, dpi=120)


def draw_decodes(public: Public, path: Path) -> None:
    """What a step of decodes takes, as it was measured and as the public simulator reads it."""
    figure = Figure(figsize=(5, 3.6), layout="constrained")
    ax = figure.subplots()
    for colour, kind in zip(COLOURS, ("a100", "h100"), strict=False):
        curve = Curve(public.points(BLOOM, kind, "token_time"))
        measured = public.decodes(BLOOM, kind)
        x = [batch for batch, context in measured if context == 576]
        ax.plot(
            x, [1e3 * measured[b, 576.0] for b in x], "o-", color=colour, label=f"{kind}, measured"
        )
        ax.plot(x, [1e3 * curve(b) for b in x], "--", color=colour, label=f"{kind}, public reading")
    ax.set(
        xlabel="decodes in the step, with 512 tokens of prompt each", ylabel="ms", ylim=(0, None)
    )
    ax.legend(frameon=False)
    figure.savefig(path, dpi=120)


def draw_pools(public: Public, trace: Work, path: Path) -> None:
    """Machines in each pool, with more and more requests."""
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    ax = figure.subplots()
    rates = (40, 70, 100, 130, 40)
    work: list[BenchRequest] = []
    for number, rate in enumerate(rates):
        part = with_arrivals(drawn(trace, rate, 60, number), Arrivals(kind="poisson", rate=rate))
        work += [replace(item, arrival=item.arrival + 60 * number) for item in part]
    with TemporaryDirectory() as folder:
        simulate(public.run_file(design("HA", "code", "power")), work, folder)
        (run,) = Path(folder).iterdir()
        pools = json.loads((run / "run.json").read_text(encoding="utf-8"))["system_report"]["pools"]
    changes = sorted((time, name, where) for name, moves in pools.items() for time, where in moves)
    now: dict[str, str] = {}
    x: list[float] = []
    y: dict[str, list[int]] = {"prompt": [], "mixed": [], "token": []}
    for time, name, where in changes:
        now[name] = where
        x.append(time)
        for pool, counts in y.items():
            counts.append(sum(place == pool for place in now.values()))
    for colour, (pool, counts) in zip(COLOURS, y.items(), strict=False):
        ax.step(x, counts, where="post", color=colour, label=f"{pool} pool")
    for number, rate in enumerate(rates):
        ax.text(60 * number + 2, 44, f"{rate} RPS", fontsize=8)
    ax.set(xlabel="seconds", ylabel="machines", xlim=(0, 60 * len(rates)), ylim=(0, 47))
    ax.legend(frameon=False, loc="center left")
    figure.savefig(path, dpi=120)


@click.command()
@click.option("--perf-model", required=True, type=click.Path(path_type=Path))
@click.option("--conversation", required=True)
@click.option("--coding", required=True)
@click.option("--anchors", "summaries", required=True, type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path))
def main(perf_model: Path, conversation: str, coding: str, summaries: Path, out: Path) -> None:
    """Print the paper's figures beside ours, and write them."""
    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as files, ProcessPoolExecutor() as pool:
        public = Public(perf_model, Path(files))
        traces = {"conv": read_workload(conversation), "code": read_workload(coding)}
        setting = Setting(public, traces, pool)
        found = anchors(public, traces["conv"], summaries)
        targets = anchor_targets(found)
        found = [{k: v for k, v in row.items() if k != "share"} for row in found]
        print("\nThe public simulator's runs")
        show_table(found)
        write_csv(out / "anchors.csv", found)
        moved, more = transfers(public)
        targets += more + table_iv(public)
        print("\nTransfers of a median coding prompt")
        show_table([{k: v for k, v in row.items() if k not in ("share", "e2e")} for row in moved])
        draw_decodes(public, out / "decodes.png")
        draw_pools(public, traces["code"], out / "pools.png")
        rows = capacities(setting)
        print("\nLargest rates, requests per second")
        show_capacities(rows)
        write_csv(out / "capacities.csv", rows)
        draw_capacities(rows, out / "capacities.png")
        long = headline(setting, by_cluster(rows, "public")["conv", "power"])
        print(f"\nWith 600 s of conversations: {long}")
        targets += ratios(rows, long)
        more_rows, more = others(setting)
        print("\nOther work, other links, another model")
        show_table(more_rows)
        write_csv(out / "others.csv", more_rows)
        targets += [*more, *batch_jobs(setting), cheapest(setting)]
    print("\nTargets")
    show_targets(targets)
    write_targets(out / "targets.csv", targets)


if __name__ == "__main__":
    main()
