"""Splitwise's results on the modelled cluster, beside the paper's and its public simulator's.

    python scripts/reproduce_splitwise.py --perf-model CSV --conversation CSV --coding CSV \
        --anchors FOLDER --out DIR

``--perf-model``: the authors' measurements (perf_model.csv); the traces: Azure's of 2023;
``--anchors``: summaries that their simulator has written on the first 1,000 conversations. An
hour or two of CPU; each part's figures are written when they are there. ``--near``: a table of
capacities like that in docs/results, near whose rates searches begin, which takes less than half.
"""

import csv
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import click
from results import (
    Target,
    by_amount,
    by_share,
    holds,
    show_table,
    show_targets,
    update_targets,
    write_csv,
)
from splitwise_alone import anchor_targets, anchors, table_iv, transfers
from splitwise_pictures import draw_capacities, draw_decodes, draw_pools
from splitwise_public import GB_S, LLAMA, Design, Public, drawn

from jaxinfer.simulate.capacity import load
from jaxinfer.simulate.run import simulate
from jaxinfer.workload.arrivals import Arrivals, with_arrivals
from jaxinfer.workload.lengths import BenchRequest, read_workload

Work = Sequence[BenchRequest]
Rows = list[dict[str, Any]]
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
# Of the paper's two ratios.
HEADLINE = ("A100", "AA", "H100", "HA")


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
        seconds, seed: of arrivals; ``joint``: see ``drawn``.
    """

    public: Public
    trace: Work
    design: Design
    seconds: float = 120
    seed: int = 0
    step: int = 2
    most: int = 160
    joint: bool = False

    def met(self, rate: int) -> bool:
        """At one rate."""
        work = drawn(self.trace, rate, self.seconds, self.seed, self.joint)
        targets = self.public.targets(self.design.model, work)
        config = self.public.run_file(self.design)
        return load(config, work, targets, (self.seed,), rate).verdict.met

    def largest(self, near: int = 0) -> int:
        """By bisection; 0 where the least rate misses.

        Args:
            near: a rate whose neighbours are tried first, further and further away.
        """
        low, high = 0, self.most // self.step + 1
        at, reach = near // self.step, 1
        if low < at < high and self.met(at * self.step):
            low = at
            while low + reach < high and self.met((low + reach) * self.step):
                low, reach = low + reach, 2 * reach
            high = min(high, low + reach)
        elif low < at < high:
            high = at
            while high - reach > low and not self.met((high - reach) * self.step):
                high, reach = high - reach, 2 * reach
            low = max(low, high - reach)
        while high - low > 1:
            middle = (low + high) // 2
            if self.met(middle * self.step):
                low = middle
            else:
                high = middle
        return low * self.step


@dataclass(frozen=True)
class Setting:
    """The authors' measurements, the traces, and where many simulations run."""

    public: Public
    traces: Mapping[str, Work]
    pool: ProcessPoolExecutor

    def largest(
        self,
        cells: Mapping[Key, tuple[str, Design]],
        near: Callable[[Key], int] = lambda key: 0,
        **how: Any,
    ) -> dict[Key, int]:
        """Of each cell, a trace and a cluster; ``near``: see ``Search.largest``."""
        searches = [Search(self.public, self.traces[t], d, **how) for t, d in cells.values()]
        rates = self.pool.map(Search.largest, searches, map(near, cells))
        return dict(zip(cells, rates, strict=True))


# Capacities.


Cell = tuple[str, str, str, bool]


def capacities(setting: Setting, near: Mapping[Cell, int]) -> Rows:
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
    found = setting.largest({key: cell for cell, key in once.items()}, lambda k: near.get(k, 0))
    return [
        {
            "trace": t, "equal": equal, "cluster": name,
            "decodes": "measured" if measured else "public",
            "machines": "+".join(str(count) for _, count in d.machines),
            "rps": found[once[t, d]],
        }
        for (t, equal, name, measured), (_, d) in cells.items()
    ]  # fmt: skip


def known_capacities(path: Path) -> dict[Cell, int]:
    """Of a file as ``main`` writes it."""
    with path.open(newline="", encoding="utf-8") as file:
        return {
            (row["trace"], row["equal"], row["cluster"], row["decodes"] == "measured"):
            int(row["rps"])
            for row in csv.DictReader(file)
        }  # fmt: skip


def headline(setting: Setting, near: Mapping[str, int]) -> dict[str, int]:
    """The clusters of the paper's ratios again, with 600 s of arrivals."""
    cells = {name: ("conv", design(name, "conv", "power")) for name in HEADLINE}
    return setting.largest(cells, near.__getitem__, seconds=600)


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


def others(setting: Setting, at_home: Mapping[str, int]) -> tuple[Rows, list[Target]]:
    """Clusters with work that they were not made for, and slower links.

    Args:
        at_home: the largest rates of conversations on their own clusters.
    """
    targets = []
    cells = {
        ("conv on the code cluster", n): ("conv", design(n, "code", "power")) for n in KINDS
    } | {
        (f"{trace}, links of 20 GiB/s", n): (trace, design(n, trace, "power", gb_s=GB_S / 10))
        for trace, names in (("conv", ("AA", "HA")), ("code", ("AA",)))
        for n in names
    }
    found = setting.largest(cells, lambda cell: at_home[cell[1]])
    rows = [{"case": case, "cluster": name, "rps": rps} for (case, name), rps in found.items()]
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
        )
    )
    return rows, targets


def of_llama(setting: Setting) -> Target:
    """Another model on BLOOM's clusters."""
    cells = {name: ("conv", design(name, "conv", "power", model=LLAMA)) for name in DESIGNS}
    found = setting.largest(cells, step=10, most=300)
    above = min(found[name] for name in KINDS) > max(found["A100"], found["H100"])
    said = ", ".join(f"{name} {rate}" for name, rate in found.items())
    return holds(
        "Llama 2 70B on BLOOM's clusters", "all Splitwise above both baselines", said, above
    )


def sensitivities(setting: Setting, near: Mapping[str, int]) -> Rows:
    """What the two ratios of conversations at equal power owe to the public rules.

    Args:
        near: the largest rates with these.
    """
    cases: Mapping[str, Mapping[str, Any]] = {
        "prompts and decodes in a step: 1.0, not 1.1": {"mixed_factor": 1.0},
        "steps of 4096 tokens, not 2048": {"step_tokens": 4096},
        "transfers layer by layer from 512 tokens": {"layerwise_from": 512},
        "outputs drawn with their prompts": {},
    }
    found = {}
    for case, changes in cases.items():
        cells = {
            (case, name): ("conv", design(name, "conv", "power", **changes)) for name in HEADLINE
        }
        found |= setting.largest(cells, lambda cell: near[cell[1]], joint=not changes)
    rows = []
    for case, of in {"as published": near, **dict.fromkeys(cases, None)}.items():
        rates_of = of or {name: found[case, name] for name in HEADLINE}
        rows.append({
            "case": case, **{name: rates_of[name] for name in HEADLINE},
            "AA / A100": round(rates_of["AA"] / rates_of["A100"], 2),
            "HA / H100": round(rates_of["HA"] / rates_of["H100"], 2),
        })  # fmt: skip
    return rows


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
@click.option("--near", "begin", type=click.Path(path_type=Path), help="Where searches begin.")
def main(
    perf_model: Path,
    conversation: str,
    coding: str,
    summaries: Path,
    out: Path,
    begin: Path | None,
) -> None:
    """Print the paper's figures beside ours, and write them."""
    out.mkdir(parents=True, exist_ok=True)
    claims: list[Target] = []

    def claim(targets: list[Target]) -> None:
        claims.extend(targets)
        update_targets(out / "targets.csv", targets)

    with TemporaryDirectory() as files, ProcessPoolExecutor() as pool:
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
        rows = capacities(setting, known_capacities(begin) if begin else {})
        write_csv(out / "capacities.csv", rows)
        show("Largest rates, requests per second", by_line(rows))
        draw_capacities(rows, out / "capacities.png")
        near = by_cluster(rows, "public")["conv", "power"]
        long = headline(setting, near)
        print(f"\nWith 600 s of conversations: {long}", flush=True)
        claim(ratios(rows, long))
        claim(batch_jobs(setting))
        rows, targets = others(setting, near)
        claim(targets)
        show("Other work, other links", rows, out / "others.csv")
        show("Sensitivities", sensitivities(setting, near), out / "sensitivities.csv")
        claim([of_llama(setting)])
    print("\nTargets")
    show_targets(claims)


if __name__ == "__main__":
    main()
