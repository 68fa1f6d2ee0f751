"""Vidur-Search's claims, by the plan driver on Vidur's 450 configurations.

    python scripts/reproduce_vidur_search.py --profiles FOLDER --arxiv CSV --out DIR [--jobs 2]

FOLDER has ``vidur`` (microsoft/vidur's profiles) and ``aiconfigurator`` (NVIDIA's); ``--arxiv`` is
Vidur's trace of Arxiv summaries, CSV, maybe packed. Each search is one ``jaxinfer plan``; what DIR
has of them is not searched again. About an hour on two cores; the search that is timed, minutes.
"""

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from matplotlib.figure import Figure
from results import (
    Target,
    by_share,
    holds,
    show_table,
    show_targets,
    write_csv,
    write_targets,
)
from vidur_search_runs import ARXIV, BWB, CHAT, ENGINES, Row, Searches
from vidur_search_tables import GPUS, make_tables

# Dollars an hour of an A100 and of an H100: Azure's, and those in Vidur's code.
PRICES = {"Azure": (3.67, 6.98), "Vidur's code": (2.21, 4.25)}
A100, H100 = GPUS
# Limits of the time between tokens, P99, in seconds.
TBT = (0.08, 0.1, 0.12, 0.14)
SARATHI = {name: options for name, options in ENGINES.items() if name.startswith("sarathi")}
# Of the ranking, and of the paper's rule: shapes near the paper's.
NEAR: Row = {"gpus": {H100: 16}, "tensor_parallel": [1, 2], "pipeline_parallel": [2, 4]}
PAPER: Row = {"gpu": H100, "tp": 2, "pp": 2, "engine": "sarathi_512", "seqs_per_stage": 256}
# Of A100s alone, what may be their best.
OF_A100: Row = {"gpus": {A100: 16}, "engines": SARATHI, "seqs_per_stage": [64, 256]}
# By the limit of the time between tokens: steps of 2,048 tokens and more are longer than all.
OF_CLIFF: Row = {
    "gpus": {H100: 16}, "seqs_per_stage": [256],
    "engines": {name: SARATHI[name] for name in ("sarathi_512", "sarathi_1024")},
}  # fmt: skip
# Requests per GPU, fewer where rates are low: 250 seconds of the best rate, and more.
SIZES = {CHAT: 1000, ARXIV: 500, BWB: 300}


def label(row: Row) -> str:
    """A configuration in words."""
    gpu = row["gpu"].partition("-")[0]
    return f"TP{row['tp']} PP{row['pp']} {row['engine']} b{row['seqs_per_stage']} {gpu}"


def sized(work: str) -> Row:
    """Options of the goal."""
    return {"requests_per_gpu": SIZES[work], "fresh_seeds": 1, "top": 1}


def per_dollar(row: Row, prices: str = "Azure") -> float:
    """Requests per second by dollars an hour."""
    usd = dict(zip(GPUS, PRICES[prices], strict=True))[row["gpu"]]
    return float(row["requests_s"] or 0.0) / (row["gpus"] * usd)


def shown(row: Row) -> Row:
    """For a table: what a configuration comes to, by GPU and at both lists of prices."""
    return {
        "configuration": label(row),
        "GPUs": row["gpus"],
        "req/s": round(row["requests_s"] or 0.0, 2),
        "per GPU": round((row["requests_s"] or 0.0) / row["gpus"], 3),
        **{f"per $/h, {name}": round(per_dollar(row, name), 4) for name in PRICES},
        "TTFT p90 (s)": _rounded(row.get("ttft_p90")),
        "TBT p99 (s)": _rounded(row.get("tbt_p99")),
        "delay p99 (s)": _rounded(row.get("delay_p99")),
    }


def _rounded(value: float | None) -> float | str:
    return "-" if value is None else round(value, 3)


def cost_of(searches: Searches, name: str, rows: Sequence[Row]) -> Row:
    """What a search has taken."""
    took = json.loads((searches.out / name / "took.json").read_text())
    return {
        "search": name,
        "configurations": len(rows),
        "cannot be": sum(row["refused"] is not None for row in rows),
        "given up": sum(row["given_up"] is not None for row in rows),
        "found in full": sum(bool(row["value"]) for row in rows),
        "seconds": round(took["seconds"]),
        "CPU seconds": round(took["cpu_s"]),
        "processes": took["jobs"],
        "load before": round(took["load"], 2),
    }


# 1. The search that the paper takes an hour of 96 cores for.


def chat(searches: Searches) -> tuple[list[Row], list[Row], list[Target]]:
    """Its cost; the best, the paper's best and each GPU's; and the targets."""
    rows = searches.rows("chat")
    costs = [cost_of(searches, "chat", rows)]
    best, paper = searches.exact("chat"), searches.one("chat_paper", PAPER, goal=sized(CHAT))
    space = {"engines": {name: SARATHI[name] for name in ("sarathi_512", "sarathi_1024")}}
    near = searches.exact("chat_near", **NEAR, **space, seqs_per_stage=[256],
                          goal={"top": 4, "at_once": 4, "fresh_seeds": 1})  # fmt: skip
    better = [row for row in near if row["value"] > paper["value"]]
    a100 = searches.exact("chat_a100", goal=sized(CHAT), **OF_A100)[0]
    twice = {"requests_per_gpu": 2000, "fresh_seeds": 1}
    doubled = searches.one("chat_doubled", best[0], goal=twice)
    table = [
        {"which": which, **shown(row)}
        for which, row in [
            *((f"best, {i}", row) for i, row in enumerate(best[:3], 1)),
            *(("better than the paper's", row) for row in better if row not in best[:3]),
            ("the paper's best", paper), ("best of A100", a100),
            ("best, twice the requests", doubled),
        ]
    ]  # fmt: skip
    seconds, jobs = costs[0]["seconds"], costs[0]["processes"]
    shape = [best[0][axis] == PAPER[axis] for axis in ("gpu", "tp", "pp")]
    ours = f"{len(better)} of batch 256 are better"
    return costs, table, [
        holds("450 configurations of LLaMA2-70B on Chat-1M: minutes", "60 on 96 cores",
              f"{seconds / 60:.1f} on {jobs} cores", len(rows) == 450 and seconds <= 600),
        holds("the paper's best is among our best three", label(PAPER), ours, len(better) < 3),
        holds("best: H100, TP2, PP2", label(PAPER), label(best[0]), all(shape)),
        by_share("the paper's best by our best, per dollar", 1,
                 per_dollar(paper) / best[0]["value"], 0.05),
        holds("best: Sarathi's chunks", "chunks of 512", best[0]["engine"],
              best[0]["engine"].startswith("sarathi")),
        holds("best: H100 at all prices, and per GPU", "H100", _gpu_at_all_prices(best[0], a100),
              _gpu_at_all_prices(best[0], a100) == "H100"),
        by_share("QPS per dollar of the best (its point at 0.14 s, Fig. 5)", 0.13,
                 best[0]["value"], 1.0),
    ]  # fmt: skip


def _gpu_at_all_prices(h100: Row, a100: Row) -> str:
    """Which GPU is ahead per GPU and per dollar; both where that differs."""
    values = [
        (r["requests_s"] / r["gpus"], *(per_dollar(r, n) for n in PRICES)) for r in (h100, a100)
    ]
    ahead = {"H100" if a > b else "A100" for a, b in zip(*values, strict=True)}
    return " or ".join(sorted(ahead))


def by_delay(searches: Searches) -> list[Row]:
    """Rates by the delay alone, as the paper finds them; what the other targets are then."""
    slo = "delay:p99=5,ttft:p90=1000,tbt:p99=1000"
    goal = {"slo": slo, "top": 3, "at_once": 3, "fresh_seeds": 1}
    engines = {"sarathi_512": ENGINES["sarathi_512"]}
    found = searches.exact("chat_delay", **NEAR, engines=engines, seqs_per_stage=[256], goal=goal)
    return [shown(row) for row in found]


# 2. Other workloads.


def workloads(searches: Searches) -> tuple[list[Row], list[Row], list[Row], list[Target]]:
    """Costs; the best of each trace; what it comes to on the others; and the targets."""
    names = {CHAT: "chat", ARXIV: "arxiv", BWB: "bwb"}
    found = {CHAT: searches.rows("chat")}
    for work in (ARXIV, BWB):
        found[work] = searches.rows(names[work], work=work, goal={**sized(work), "top": 3})
    costs = [cost_of(searches, names[work], found[work]) for work in (ARXIV, BWB)]
    best = {work: max(rows, key=lambda row: row["value"] or 0) for work, rows in found.items()}
    a100 = {
        work: searches.exact(f"{name}_a100", work=work, goal=sized(work), **OF_A100)[0]
        for work, name in names.items()
    }
    table = [{"trace": work, **shown(row)} for of in (best, a100) for work, row in of.items()]
    crossed: list[Row] = []
    factors: dict[tuple[str, str], float] = {}
    for trace, right in best.items():
        for other, row in best.items():
            if other == trace:
                continue
            name = f"{names[trace]}_by_{names[other]}"
            there = searches.one(name, row, work=trace, goal=sized(trace))
            cost = right["value"] / value if (value := per_dollar(there)) else float("inf")
            factors[trace, other] = cost
            crossed.append(
                {"trace": trace, "configuration of": other, "which is": label(row),
                 "req/s per $/h": round(value, 4), "costs": round(cost, 2)}
            )  # fmt: skip
    distinct = {label(row) for row in best.values()}
    worst = max(cost for cost in factors.values() if cost < float("inf"))
    share = {work: best[work]["value"] / per_dollar(a100[work]) for work in best}
    return costs, table, crossed, [
        holds("the best changes with the workload", "3 of 3 differ", f"{len(distinct)} of 3",
              len(distinct) > 1),
        holds("LLaMA2-70B on BWB-4K: A100", "A100",
              f"H100, {share[BWB]:.2f} times A100" if best[BWB]["gpu"] == H100 else "A100",
              best[BWB]["gpu"] == A100),
        holds("smaller batches on BWB-4K than on Chat-1M", "64 and 256",
              f"{best[BWB]['seqs_per_stage']} and {best[CHAT]['seqs_per_stage']}",
              best[BWB]["seqs_per_stage"] < best[CHAT]["seqs_per_stage"]),
        by_share("Chat-1M with Arxiv-4K's best configuration costs (times)", 2,
                 factors[CHAT, ARXIV], 0.25),
        holds("a wrong configuration costs up to (times)", "2", f"{worst:.2f}", worst >= 1.5),
        holds("per dollar: Chat-1M, then Arxiv-4K, then BWB-4K", "as stated",
              ", ".join(sorted(best, key=lambda w: -best[w]["value"])),
              best[CHAT]["value"] > best[ARXIV]["value"] > best[BWB]["value"]),
    ]  # fmt: skip


def qwen(searches: Searches) -> tuple[list[Row], list[Row], list[Target]]:
    """A model with eight times the KV: cost, table and targets."""
    goal = {"requests_per_gpu": 250, "fresh_seeds": 1, "top": 2, "at_once": 4}
    how = {"model": "qwen-72b", "work": ARXIV, "goal": goal}
    space = {"engines": SARATHI, "seqs_per_stage": [128]}
    rows = searches.rows("qwen_arxiv", **how, **space)
    best = searches.exact("qwen_arxiv", **how, **space)
    theirs = PAPER | {"tp": 4, "pp": 1, "seqs_per_stage": 128}
    paper = searches.one("qwen_arxiv_paper", theirs, **how)
    llama = searches.exact("arxiv", work=ARXIV, goal={**sized(ARXIV), "top": 3})[0]
    table = [{"which": which, **shown(row)} for which, row in
             [*((f"best, {i}", row) for i, row in enumerate(best[:3], 1)),
              ("the paper's best", paper), ("LLaMA2-70B, best", llama)]]  # fmt: skip
    return [cost_of(searches, "qwen_arxiv", rows)], table, [
        holds("Qwen-72B on Arxiv-4K, best", label(theirs), label(best[0]),
              label(theirs) == label(best[0])),
        by_share("Qwen-72B on Arxiv-4K, the paper's best: QPS per dollar", 0.03, per_dollar(paper),
                 1.0),
        by_share("Qwen-72B costs so many times LLaMA2-70B (Arxiv-4K)", 2,
                 llama["value"] / best[0]["value"], 0.5),
    ]  # fmt: skip


# 3. The cliff.


def cliff(searches: Searches, path: Path) -> tuple[list[Row], list[Target]]:
    """The best by the limit of the time between tokens."""
    table = []
    for limit in TBT:
        slo = f"ttft:p90=2,tbt:p99={limit},delay:p99=5"
        goal = {**sized(ARXIV), "slo": slo, "at_once": 3}
        found = searches.exact(f"chat_tbt_{limit:g}", goal=goal, **OF_CLIFF)
        row = found[0] if found else None
        table.append(
            {"TBT p99 below (s)": limit, "configuration": label(row) if row else "none",
             "req/s per $/h": round(row["value"], 4) if row else 0.0}
        )  # fmt: skip
    values = [row["req/s per $/h"] for row in table]
    steps = {
        (a, b): values[j] / values[i]
        for i, a in enumerate(TBT) for j, b in enumerate(TBT)
        if 0 < b - a < 0.0201 and values[i]
    }  # fmt: skip
    (a, b), most = max(steps.items(), key=lambda item: item[1])
    figure = Figure((5.2, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.plot(TBT, values, "o-", ms=4, label="best of 18 configurations")
    axes.plot([0.12, 0.14], [0.07, 0.13], "s--", ms=4, label="paper, from its text")
    axes.set(xlabel="limit of TBT p99, s", ylabel="requests/s per dollar an hour", ylim=(0, None))
    axes.legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=120)
    return table, [
        holds("20 ms of TBT are worth (times)", "1.85, from 0.12 to 0.14 s",
              f"{most:.2f}, from {a:g} to {b:g} s", most >= 1.5),
        by_share("from 0.12 to 0.14 s (times)", 1.85,
                 values[TBT.index(0.14)] / values[TBT.index(0.12)], 0.25),
    ]  # fmt: skip


def unpack(path: Path, to: Path) -> Path:
    """A trace as plain CSV."""
    if path.suffix == ".gz":
        to.write_bytes(gzip.decompress(path.read_bytes()))
        return to
    return path


@click.command()
@click.option("--profiles", required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--arxiv", required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--out", required=True, type=click.Path(path_type=Path))
@click.option("--jobs", default=2, type=click.IntRange(min=1))
def main(profiles: Path, arxiv: Path, out: Path, jobs: int) -> None:
    """Print all tables, and write them, the targets and the pictures."""
    out.mkdir(parents=True, exist_ok=True)
    tables = {
        model: {gpu: make_tables(profiles, model, gpu, out / "tables") for gpu in GPUS}
        for model in ("llama-2-70b", "qwen-72b")
    }
    drawn = {CHAT: "chat_1m_4k", BWB: "bwb_4k"}
    works: dict[str, Mapping[str, Any]] = {
        name: {"synthetic": {"lengths": lengths, "count": 16_000, "seed": 0}}
        for name, lengths in drawn.items()
    }
    works[ARXIV] = {"trace": str(unpack(arxiv, out / "arxiv.csv")), "limit": 16_000}
    searches = Searches(out / "searches", tables, works, jobs)
    targets: list[Target] = []

    def add(title: str, name: str, rows: list[Row], more: Sequence[Target] = ()) -> None:
        print(f"\n## {title}\n")
        show_table(rows)
        write_csv(out / f"{name}.csv", rows)
        targets.extend(more)

    costs, table, more = chat(searches)
    add("LLaMA2-70B on Chat-1M", "chat", table, more)
    add("By delay alone", "by_delay", by_delay(searches))
    others, table, crossed, more = workloads(searches)
    add("The best of each trace, of all and of A100s", "workloads", table, more)
    add("With another trace's best", "crossed", crossed)
    last, table, more = qwen(searches)
    add("Qwen-72B on Arxiv-4K", "qwen", table, more)
    add("What the searches took", "costs", [*costs, *others, *last])
    table, more = cliff(searches, out / "cliff.png")
    add("By the limit of the time between tokens", "cliff", table, more)
    print("\n## Targets\n")
    show_targets(targets)
    write_targets(out / "targets.csv", targets)


if __name__ == "__main__":
    main()
