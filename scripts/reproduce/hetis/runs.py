"""Whole runs on Hetis' modelled cluster."""

from collections.abc import Mapping
from typing import Any

from scripts.reproduce.claims import Target, agrees, holds
from scripts.reproduce.hetis.cases import (
    LARGE,
    OTHERS,
    PRIMARIES,
    SEVENTY,
    THIRTEEN,
    THIRTY,
    TWO,
    cluster,
    hetis,
    modelled,
    run,
)
from scripts.reproduce.reproduction import Inputs, Part
from scripts.tables import Row

# 70B as pipelines over all GPUs: by Table 1's prefill, by its decode, and by memory.
STATIC = {
    "prefill speeds": (("a", 55), ("b", 12), ("c", 11), ("p", 2)),
    "decode speeds": (("a", 44), ("b", 15), ("c", 15), ("p", 6)),
    "memory": (("a", 55), ("b", 9), ("c", 8), ("p", 8)),
}
# Load, lengths, requests/s, and number of requests.
LOADS = (
    ("1.5 requests/s", "sharegpt", 1.5, 500),
    ("5 requests/s", "sharegpt", 5.0, 500),
    ("all at once", "sharegpt", 1e6, 500),
    ("long prompts, 0.8 requests/s", "arxiv_4k", 0.8, 250),
    ("long prompts, all at once", "arxiv_4k", 1e6, 500),
)
# For models whose layers only the A100s have; pipelines are by Table 1's prefill.
SMALLER = {
    "13B": (THIRTEEN, (("a", 28), ("b", 6), ("c", 5), ("p", 1))),
    "OPT-30B": (THIRTY, (("a", 33), ("b", 7), ("c", 7), ("p", 1))),
}


FIGURES = ("TTFT p50", "TBT p50", "requests/s")


def systems(inputs: Inputs) -> Part:
    """70B on the whole cluster: Hetis, its primaries alone, and pipelines over all GPUs."""
    ways: dict[str, tuple[Any, Any, Any]] = {
        "Hetis": (PRIMARIES, ("p",), hetis()),
        "Hetis, heads by memory": (PRIMARIES, ("p",), hetis(placement="memory")),
        "primaries alone": (PRIMARIES, (), None),
        **{f"pipeline by {by}": (layers, (), None) for by, layers in STATIC.items()},
    }
    rows = []
    for name, lengths, rate, count in LOADS:
        for way, (layers, attention, system) in ways.items():
            config = cluster(SEVENTY, layers, attention, system, LARGE, None, rate, count, lengths)
            rows.append({"load": name, "system": way, **run(config)})
    ratios = ratios_to(rows, "pipeline by prefill speeds")
    most = [max(ratios[name, what] for name, *_ in LOADS) for what in FIGURES]
    return Part(rows, [
        *better_than(ratios, "a pipeline's over all GPUs", 1.0, "better"),
        *better_than(ratios_to(rows, "primaries alone"), "its primaries' alone", 0.99,
                     "better, or within 1 %"),
        _most("70B: the most by which latency is better than a pipeline's", 1.49, max(most[:2])),
        _most("70B: the most by which requests/s are better than a pipeline's", 2.25, most[2]),
    ])  # fmt: skip


def ratios_to(rows: list[Row], other: str) -> dict[tuple[str, str], float]:
    """Return the ratio of Hetis to another system, by load and figure."""
    by = {(row["load"], row["system"]): row for row in rows}
    found = {}
    for name, *_ in LOADS:
        for figure in FIGURES:
            ratio = by[name, other][figure] / by[name, "Hetis"][figure]
            found[name, figure] = 1 / ratio if figure == "requests/s" else ratio
    return found


def better_than(
    ratios: Mapping[tuple[str, str], float], words: str, least: float, criterion: str
) -> list[Target]:
    """Return claims that Hetis is better at each load; the paper's own figures are lost."""
    return [
        agrees(
            f"70B, {name}: {figure} beside {words}", f"{ratio:.3f} times", ratio >= least, criterion
        )
        for (name, figure), ratio in ratios.items()
    ]


def _most(claim: str, paper: float, ours: float) -> Target:
    """Return the target for a paper's "up to N times"."""
    criterion = f"{paper:g} times or more"
    return holds(claim, f"up to {paper:g}", f"{ours:.3f} times", ours >= paper, criterion)


def smaller_models(inputs: Inputs) -> Part:
    """Models without GQA, whose layers need only the A100s."""
    rows, targets, ratios = list[Row](), list[Target](), list[float]()
    for name, (model, static) in SMALLER.items():
        ways: dict[str, tuple[Any, Any, Any]] = {
            "Hetis": ((("a", None),), OTHERS, hetis()),
            "primaries alone": ((("a", None),), (), None),
            "pipeline by prefill speeds": (static, (), None),
        }
        by = {}
        for load, rate in (("10 requests/s", 10.0), ("all at once", 1e6)):
            for way, (layers, attention, system) in ways.items():
                config = cluster(model, layers, attention, system, LARGE, None, rate, 500)
                by[load, way] = run(config)
                rows.append({"model": name, "load": load, "system": way, **by[load, way]})
            ours, theirs = by[load, "Hetis"], by[load, "pipeline by prefill speeds"]
            ratio = ours["requests/s"] / theirs["requests/s"]
            claim = f"{name}, {load}: requests/s beside a pipeline's over all GPUs"
            ratios.append(ratio)
            targets.append(agrees(claim, f"{ratio:.2f} times", ratio >= 1, "better"))
    claim = "13B and OPT-30B: the most by which requests/s are better than a pipeline's"
    return Part(rows, [*targets, _most(claim, 2.25, max(ratios))])


def redispatch(inputs: Inputs) -> Part:
    """13B with pools that are too small: moves, preemption of the latest request, and Theta."""
    pools = {"num_pages": 400, "max_num_seqs": 256}
    ways: dict[str, dict[str, Any]] = {"LIFO": hetis(theta=None)}
    ways |= {
        f"Theta {theta:g}": hetis(theta=theta) for theta in (0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 2.0)
    }
    ways["Theta 0.5, by a linear program"] = {"name": "scripts.reproduce.hetis.dispatch:ByProgram"}
    rows = []
    for way, system in ways.items():
        config = cluster(THIRTEEN, (("one", None),), TWO, system, pools, 200, 5.0)
        rows.append({"way": way, **run(config)})
    by = {row["way"]: row for row in rows}
    lifo, usual, program = by["LIFO"], by["Theta 0.5"], by["Theta 0.5, by a linear program"]
    best = min(rows[1:-1], key=lambda row: row["s/token mean"])
    targets = [
        holds(
            "moves preempt less than LIFO (Fig. 15a)",
            "fewer",
            f"{usual['preemptions']} beside {lifo['preemptions']}",
            usual["preemptions"] < lifo["preemptions"],
            "fewer",
        ),
    ]
    for figure in ("s/token mean", "s/token p95"):
        ratio = usual[figure] / lifo[figure]
        claim = f"moves have lower {figure} than LIFO (Fig. 15a)"
        targets.append(holds(claim, "lower", f"{ratio:.3f} times", ratio < 1, "lower"))
    return Part(rows, [
        *targets,
        holds("Theta 0.5 is in the best range (Fig. 16)", "in the best range",
              f"{usual['s/token mean'] / best['s/token mean']:.3f} times that of {best['way']}",
              usual["s/token mean"] <= 1.05 * best["s/token mean"], "within 5 % of the best"),
        agrees("greedy is as good as a linear program, by mean time per token",
              f"{usual['s/token mean'] / program['s/token mean']:.3f} times",
              usual["s/token mean"] <= 1.05 * program["s/token mean"], "within 5 %"),
    ])  # fmt: skip


def wrong_figures(inputs: Inputs) -> Part:
    """Cost of wrong coefficients of eqs. 3 and 4 (each that is not 0), 13B at 5 requests/s."""
    instance = modelled(cluster(THIRTEEN, (("one", None),), TWO, hetis()))
    fits = {shard.group: vars(shard.cost.fit) for shard in instance.shards if shard.cost}
    rows = [{"coefficient": "none", "change (%)": 0, **_with(fits)}]
    for group, known in fits.items():
        for name, seconds in known.items():
            for change in (-50, -20, -10, 10, 20, 50):
                if seconds:
                    wrong = known | {name: seconds * (1 + change / 100)}
                    found = _with(fits | {group: wrong})
                    rows.append(
                        {"coefficient": f"{name} of {group}", "change (%)": change, **found}
                    )
    base = rows[0]["s/token mean"]
    costs = {
        most: max(row["s/token mean"] / base - 1 for row in rows if abs(row["change (%)"]) == most)
        for most in (10, 20, 50)
    }
    says = ", ".join(f"{100 * cost:.1f} % at {most} %" for most, cost in costs.items())
    worst = max(costs[10], costs[20])
    # The public text does not say how wrong the paper's coefficients are; 20 % is our choice.
    claim = "coefficients that are off cost at most 6.9 % of the time per token (Fig. 16)"
    criterion = "at most 6.9 % at 10 and at 20 %, chosen here"
    return Part(rows, [holds(claim, "6.9 %", says, worst <= 0.069, criterion, "calibrated")])


def _with(attention: Mapping[str, Mapping[str, float]]) -> Row:
    system = hetis(attention={group: dict(fit) for group, fit in attention.items()})
    return run(cluster(THIRTEEN, (("one", None),), TWO, system, rate=5.0, count=300))
