"""The largest rates of Splitwise's clusters, by its public simulator's rules."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from jaxinfer.simulate.capacity import load
from jaxinfer.simulate.run import simulate
from jaxinfer.workload.arrivals import Arrivals, with_arrivals
from scripts.reproduce.reproduction import Work
from scripts.reproduce.splitwise.public import GB_S, LLAMA, Public, PublicDesign, drawn

Rows = list[dict[str, Any]]
Key = TypeVar("Key")
# Machines for prompts and for tokens in the public notebook's splits, by the quantity that equals
# that of 40 DGX-H100.
SPLITS: Mapping[tuple[str, str], Mapping[str, tuple[int, int]]] = {
    ("conv", "power"): {"AA": (45, 25), "HH": (25, 15), "HA": (25, 26), "HHcap": (25, 21)},
    ("conv", "cost"): {"AA": (51, 35), "HH": (25, 15), "HA": (30, 21), "HHcap": (30, 10)},
    ("code", "power"): {"AA": (55, 15), "HH": (35, 5), "HA": (35, 8), "HHcap": (35, 7)},
    ("code", "cost"): {"AA": (66, 20), "HH": (35, 5), "HA": (35, 10), "HHcap": (35, 7)},
}
KINDS = {
    "AA": ("a100", "a100"),
    "HH": ("h100", "h100"),
    "HA": ("h100", "a100"),
    "HHcap": ("h100", "h100_capped"),
}
BASELINES = {"power": {"A100": 70, "H100": 40}, "cost": {"A100": 86, "H100": 40}}
DESIGNS = ("A100", "H100", *KINDS)
# Clusters of the paper's two ratios.
HEADLINE = ("A100", "AA", "H100", "HA")


def design(name: str, trace: str, equal: str, **changes: Any) -> PublicDesign:
    """Return a cluster of the paper's comparison."""
    if name in BASELINES[equal]:
        return PublicDesign(BASELINES[equal][name], name.lower(), **changes)
    (p, t), (here, there) = SPLITS[trace, equal][name], KINDS[name]
    return PublicDesign(p, here, t, there, **changes)


@dataclass(frozen=True)
class CapacitySearch:
    """Finds the largest rate of a grid at which all nine targets are met.

    Attributes:
        public: files made from the authors' measurements.
        trace: requests to draw from.
        design: the cluster.
        seconds: seconds of arrivals.
        seed: seed of the arrivals.
        step: step of the grid, in requests per second.
        most: largest rate of the grid.
        joint: see ``drawn``.
    """

    public: Public
    trace: Work
    design: PublicDesign
    seconds: float = 120
    seed: int = 0
    step: int = 2
    most: int = 160
    joint: bool = False

    def met(self, rate: int) -> bool:
        """True if the targets are met at one rate."""
        work = drawn(self.trace, rate, self.seconds, self.seed, self.joint)
        targets = self.public.targets(self.design.model, work)
        config = self.public.run_file(self.design)
        return load(config, work, targets, (self.seed,), rate).verdict.met

    def largest(self, near: int = 0) -> int:
        """Find the largest rate by bisection; 0 if the smallest rate misses the targets.

        Args:
            near: a rate whose neighbours are tried first, at growing distances.
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
    """The authors' measurements, the traces, and processes for simulations."""

    public: Public
    traces: Mapping[str, Work]
    pool: ProcessPoolExecutor

    def largest(
        self,
        cells: Mapping[Key, tuple[str, PublicDesign]],
        near: Callable[[Key], int] = lambda key: 0,
        **how: Any,
    ) -> dict[Key, int]:
        """Find the largest rate of each cell (trace, cluster).

        Args:
            near: see ``CapacitySearch.largest``.
        """
        searches = [
            CapacitySearch(self.public, self.traces[t], d, **how) for t, d in cells.values()
        ]
        rates = self.pool.map(CapacitySearch.largest, searches, map(near, cells))
        return dict(zip(cells, rates, strict=True))


def capacities(setting: Setting) -> Rows:
    """Find rates under both readings of decode times, at equal power and at equal cost."""
    cells = {
        (trace, equal, name, measured): (trace, design(name, trace, equal, measured=measured))
        for trace in ("conv", "code")
        for equal in ("power", "cost")
        for name in DESIGNS
        for measured in (False, True)
        if equal == "power" or not measured
    }
    # Some cells are the same cluster.
    once = {cell: key for key, cell in reversed(cells.items())}
    found = setting.largest({key: cell for cell, key in once.items()})
    return [
        {
            "trace": t,
            "equal": equal,
            "cluster": name,
            "decodes": "measured" if measured else "public",
            "machines": "+".join(str(count) for _, count in d.machines),
            "rps": found[once[t, d]],
        }
        for (t, equal, name, measured), (_, d) in cells.items()
    ]


def headline(setting: Setting, near: Mapping[str, int]) -> Rows:
    """Find the rates of the clusters of the paper's ratios with 600 s of arrivals."""
    cells = {name: ("conv", design(name, "conv", "power")) for name in HEADLINE}
    found = setting.largest(cells, near.__getitem__, seconds=600)
    return [{"cluster": name, "rps": rps} for name, rps in found.items()]


def per_dollar(public: Public, trace: Work, cluster: PublicDesign, gpu_usd: float) -> float:
    """Return the requests per second of batch jobs, per dollar an hour for one GPU of each machine.

    No cluster sustains the 180 requests per second. Requests that end from 60 to 240 seconds count.
    """
    work = drawn(trace, 180, 240, 0)
    ended = 0

    def on_request(_: Any, times: Sequence[float]) -> None:
        nonlocal ended
        ended += 60 <= times[-1] < 240

    arrivals = Arrivals(kind="poisson", rate=180, seed=0)
    simulate(public.run_file(cluster), with_arrivals(work, arrivals), on_request=on_request)
    return ended / 180 / gpu_usd


def batch_jobs(setting: Setting) -> Rows:
    """Return the rows of section VI-E."""
    clusters = {name: design(name, "conv", "power") for name in ("A100", "AA", "H100", "HH")}
    # The notebook's prices of a GPU-hour.
    usd = [
        sum({"a100": 2.21, "h100": 4.76}[kind] * count for kind, count in cluster.machines)
        for cluster in clusters.values()
    ]
    measure = partial(per_dollar, setting.public, setting.traces["conv"])
    found = setting.pool.map(measure, clusters.values(), usd)
    return [
        {"cluster": name, "rps_by_usd": each} for name, each in zip(clusters, found, strict=True)
    ]


def others(setting: Setting, at_home: Mapping[str, int]) -> Rows:
    """Return rows of clusters with work that they were not made for, and with slower links.

    Args:
        at_home: largest rates of conversations on their own clusters.
    """
    cells = {
        ("conv on the code cluster", n): ("conv", design(n, "code", "power")) for n in KINDS
    } | {
        (f"{trace}, links of 20 GiB/s", n): (trace, design(n, trace, "power", gb_s=GB_S / 10))
        for trace, names in (("conv", ("AA", "HA")), ("code", ("AA",)))
        for n in names
    }
    found = setting.largest(cells, lambda cell: at_home[cell[1]])
    return [{"case": case, "cluster": name, "rps": rps} for (case, name), rps in found.items()]


def of_llama(setting: Setting) -> Rows:
    """Return capacities of another model on BLOOM's clusters."""
    cells = {name: ("conv", design(name, "conv", "power", model=LLAMA)) for name in DESIGNS}
    found = setting.largest(cells, step=10, most=300)
    return [{"cluster": name, "rps": rps} for name, rps in found.items()]


def sensitivities(setting: Setting, near: Mapping[str, int]) -> Rows:
    """Return the effect of the public rules on two ratios: conversations at equal power.

    Args:
        near: largest rates with these rules.
    """
    cases: Mapping[str, Mapping[str, Any]] = {
        "prompts and decodes in a step: 1.0, not 1.1": {"mixed_factor": 1.0},
        "steps of 4096 tokens, not 2048": {"step_tokens": 4096},
        "transfers layer by layer from 512 tokens": {"layerwise_from": 512},
        "outputs drawn with their prompts": {},
    }
    found: dict[tuple[str, str], int] = {}
    for case, changes in cases.items():
        cells = {
            (case, name): ("conv", design(name, "conv", "power", **changes)) for name in HEADLINE
        }
        found |= setting.largest(cells, lambda cell: near[cell[1]], joint=not changes)
    rows = []
    for case, of in {"as published": near, **dict.fromkeys(cases, None)}.items():
        rates_of = of or {name: found[case, name] for name in HEADLINE}
        rows.append(
            {
                "case": case,
                **{name: rates_of[name] for name in HEADLINE},
                "AA / A100": round(rates_of["AA"] / rates_of["A100"], 2),
                "HA / H100": round(rates_of["HA"] / rates_of["H100"], 2),
            }
        )
    return rows
