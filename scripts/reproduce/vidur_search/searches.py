"""Vidur-Search's claims, by the planner on Vidur's 450 configurations.

Each search is one ``jaxinfer plan``; kept results are not searched again.
"""

import json
from collections.abc import Sequence

from matplotlib.figure import Figure

from scripts.reproduce.claims import agrees, by_share, holds
from scripts.reproduce.reproduction import Inputs, Part
from scripts.reproduce.vidur_search.runs import ARXIV, BWB, CHAT, ENGINES, Searches, made
from scripts.reproduce.vidur_search.tables import GPUS
from scripts.tables import Row

# Dollars an hour of an A100 and of an H100: Azure's, and those in Vidur's code.
PRICES = {"Azure": (3.67, 6.98), "Vidur's code": (2.21, 4.25)}
A100, H100 = GPUS
# Limits of the time between tokens (P99), in seconds.
TBT = (0.1, 0.12, 0.14, 0.16, 0.18, 0.2)
SARATHI = {name: options for name, options in ENGINES.items() if name.startswith("sarathi")}
# Shapes near the paper's.
NEAR: Row = {"gpus": {H100: 16}, "tensor_parallel": [1, 2], "pipeline_parallel": [2, 4]}
PAPER: Row = {"gpu": H100, "tp": 2, "pp": 2, "engine": "sarathi_512", "seqs_per_stage": 256}
SMALL = {name: SARATHI[name] for name in ("sarathi_512", "sarathi_1024")}
# Requests per GPU; fewer where rates are low: 200 seconds of Chat-1M's best rate, 320 of BWB-4K's.
SIZES = {CHAT: 1000, ARXIV: 500, BWB: 200}
# Requests per GPU of longer runs: eight for each seat of Chat-1M's best.
LONGER = 2048
# BWB-4K's best configuration, and the best with A100s there, as found by ``--whole``.
BWB_BEST: Row = PAPER | {"pp": 4}
BWB_A100: Row = PAPER | {"gpu": A100, "tp": 4, "pp": 1}


def label(row: Row) -> str:
    """Return a configuration in words."""
    gpu = row["gpu"].partition("-")[0]
    return f"TP{row['tp']} PP{row['pp']} {row['engine']} b{row['seqs_per_stage']} {gpu}"


def sized(work: str) -> Row:
    """Return options of the goal."""
    return {"requests_per_gpu": SIZES[work], "fresh_seeds": 1, "top": 1}


def per_dollar(row: Row, prices: str = "Azure") -> float:
    """Return requests per second divided by dollars an hour."""
    usd = dict(zip(GPUS, PRICES[prices], strict=True))[row["gpu"]]
    return float(row["requests_s"] or 0.0) / (row["gpus"] * usd)


def shown(row: Row) -> Row:
    """Return a configuration's row for a table, by GPU and at both lists of prices."""
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
    """Return the cost of a search."""
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


def chat(inputs: Inputs) -> Part:
    """The best, and the paper's best, with the time that the paper's search takes."""
    searches = inputs.shared(made)
    rows = searches.rows("chat")
    best, near = searches.exact("chat"), near_shapes(searches)
    paper = searches.one("chat_paper", PAPER, goal=sized(CHAT))
    better = [row for row in near if row["value"] > paper["value"]]
    table = [
        {"which": which, **shown(row)}
        for which, row in [
            *((f"best, {i}", row) for i, row in enumerate(best[:3], 1)),
            *(("better than the paper's", row) for row in better if label(row) != label(best[0])),
            ("the paper's best", paper),
        ]
    ]
    cost = cost_of(searches, "chat", rows)
    seconds, jobs = cost["seconds"], cost["processes"]
    shape = [best[0][axis] == PAPER[axis] for axis in ("gpu", "tp", "pp")]
    tp2 = max(row["value"] for row in near if row["tp"] == 2)
    given_up = [row for row in rows if row["gpu"] == A100 and not row["refused"]]
    return Part(table, [
        agrees("450 configurations of LLaMA2-70B on Chat-1M: minutes (paper: 60 on 96 cores)",
               f"{seconds / 60:.1f} on {jobs} cores", len(rows) == 450 and seconds <= 600,
               "at most 10"),
        holds("the paper's best is among our best three", label(PAPER),
              f"{len(better)} of batch 256 are better", len(better) < 3, "fewer than 3 are better"),
        holds("best: H100, TP2, PP2", label(PAPER), label(best[0]), all(shape), "equal"),
        by_share("the paper's best by our best, per dollar", 1,
                 per_dollar(paper) / best[0]["value"], 0.05),
        by_share("the same, by the best of TP2", 1, per_dollar(paper) / tp2, 0.05, "consistency"),
        holds("best: Sarathi's chunks of 512", "sarathi_512", best[0]["engine"],
              best[0]["engine"] == "sarathi_512", "equal"),
        holds("best: H100, no A100 comes near", "H100",
              f"{len(given_up)} of A100 given up at the H100's rate per dollar",
              best[0]["gpu"] == H100 and all(row["given_up"] for row in given_up),
              "each A100's is below the best of H100"),
        by_share("QPS per dollar of the best (its point at 0.14 s, Fig. 5)", 0.13,
                 best[0]["value"], 0.2),
    ])  # fmt: skip


def near_shapes(searches: Searches) -> list[Row]:
    """Return shapes near the paper's with its batch, searched in full."""
    goal = {"top": 4, "at_once": 4, "fresh_seeds": 1}
    return searches.exact("chat_near", **NEAR, engines=SMALL, seqs_per_stage=[256], goal=goal)


def cliff(inputs: Inputs) -> Part:
    """The best by the limit of the time between tokens, of the fully searched configurations.

    For a configuration that TTFT limits, a limit above its time between tokens changes nothing.
    """
    searches = inputs.shared(made)
    found = [*searches.exact("chat"), *near_shapes(searches)]
    table = []
    for limit in TBT:
        row = max((row for row in found if row["tbt_p99"] <= limit), key=lambda r: r["value"])
        table.append(
            {
                "TBT p99 below (s)": limit,
                "configuration": label(row),
                "req/s per $/h": round(row["value"], 4),
            }
        )
    values = [float(row["req/s per $/h"]) for row in table]
    ratio = values[TBT.index(0.14)] / values[TBT.index(0.12)]
    claim = "20 ms of TBT: QPS per dollar at 0.14 s by that at 0.12 s"
    once = {label(row): (row["tbt_p99"], row["value"]) for row in found}
    figure = draw_cliff(list(once.values()), values)
    return Part(table, [by_share(claim, 1.85, ratio, 0.2)], {"cliff": figure})


def draw_cliff(points: Sequence[tuple[float, float]], best: Sequence[float]) -> Figure:
    """Draw requests/s per dollar an hour over TBT p99.

    Args:
        points: TBT p99 and value of each configuration that was simulated in full.
        best: the best value for each limit of TBT.
    """
    figure = Figure((5.6, 3.8), layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*points, strict=True), "o", ms=4, c="0.6")
    axes.step(TBT, best, where="post", c="#0072B2")
    axes.plot([0.12, 0.14], [0.07, 0.13], "s", ms=5, c="#D55E00")
    axes.text(0.145, best[TBT.index(0.14)] + 0.02, "best within a limit, ours", c="#0072B2")
    axes.text(0.145, 0.12, "best within a limit,\nin the paper's text", c="#D55E00", va="center")
    axes.text(
        0.145, 0.45, "grey: each configuration\nthat we simulated in full", c="0.4", va="center"
    )
    axes.set(xlabel="TBT p99, or its limit (s)", ylabel="requests/s per dollar an hour")
    axes.set_ylim(0, 1.15 * max(best))
    rise = best[TBT.index(0.14)] / best[TBT.index(0.12)] - 1
    axes.set_title(f"A limit of 0.14 s instead of 0.12 s gains {rise:.0%}", fontsize=10, loc="left")
    return figure


def longer(inputs: Inputs) -> Part:
    """The best and the paper's best with more requests, since a short trace has too few."""
    searches = inputs.shared(made)
    best, table = searches.exact("chat")[0], []
    for count, name in ((SIZES[CHAT], ""), (LONGER, "_longer")):
        goal = sized(CHAT) | {"requests_per_gpu": count}
        rates = [
            searches.one(f"chat_{of}{name}", row, goal=goal)["requests_s"]
            for of, row in (("best", best), ("paper", PAPER))
        ]
        table.append(
            {
                "requests": count * best["gpus"],
                label(best): round(rates[0], 2),
                label(PAPER): round(rates[1], 2),
                "ratio": round(rates[0] / rates[1], 3),
            }
        )
    return Part(table)


def arxiv_rows(searches: Searches) -> list[Row]:
    """Return the search on Arxiv-4K."""
    return searches.rows("arxiv", work=ARXIV, goal={**sized(ARXIV), "top": 3})


def costs(inputs: Inputs) -> Part:
    """Cost of the two whole searches."""
    searches = inputs.shared(made)
    found = {"chat": searches.rows("chat"), "arxiv": arxiv_rows(searches)}
    return Part([cost_of(searches, name, rows) for name, rows in found.items()])


def workloads(inputs: Inputs) -> Part:
    """The best of Arxiv-4K, some configurations on BWB-4K, and the targets."""
    searches = inputs.shared(made)
    rows = arxiv_rows(searches)
    arxiv = max(rows, key=lambda row: row["value"] or 0)
    tied = {r["seqs_per_stage"] for r in rows if r["value"] == arxiv["value"]}
    best = searches.exact("chat")[0]
    on_bwb = {
        "Chat-1M's best": searches.one("bwb_by_chat", best, work=BWB, goal=sized(BWB)),
        "the paper's of Chat-1M": searches.one("bwb_by_paper", PAPER, work=BWB, goal=sized(BWB)),
        "the same on A100": searches.one(
            "bwb_by_a100", PAPER | {"gpu": A100}, work=BWB, goal=sized(BWB)
        ),
        "best": searches.one("bwb_pp4", BWB_BEST, work=BWB, goal=sized(BWB)),
        "A100's best": searches.one("bwb_a100_tp4", BWB_A100, work=BWB, goal=sized(BWB)),
    }
    table = [
        {"trace": trace, "which": which, **shown(row)}
        for trace, which, row in [
            (CHAT, "best", best),
            (ARXIV, "best", arxiv),
            *((BWB, which, row) for which, row in on_bwb.items()),
        ]
    ]
    chats, _, _, h100, a100 = map(per_dollar, on_bwb.values())
    most = max(h100, a100)
    return Part(table, [
        holds("Arxiv-4K has another best than Chat-1M", "another best",
              f"{label(arxiv)}; batches {', '.join(map(str, sorted(tied)))} are equal",
              any(arxiv[axis] != best[axis] for axis in ("gpu", "tp", "pp", "engine")),
              "another GPU, TP, PP or engine"),
        holds("BWB-4K has another best than Chat-1M", "another best",
              f"{label(BWB_BEST)} is {h100 / chats:.2f} times Chat-1M's best", h100 > chats,
              "better than Chat-1M's best"),
        holds("the best of another trace costs up to twice as much", "2",
              f"{h100 / chats:.2f}", h100 / chats >= 2, "2 or more"),
        holds("BWB-4K: A100 ahead of H100", "A100", f"H100, {h100 / a100:.2f} times A100",
              a100 > h100, "ahead"),
        holds("per dollar: Chat-1M, then Arxiv-4K, then BWB-4K", "this order",
              f"{best['value']:.3f}, {arxiv['value']:.3f}, {most:.3f}",
              best["value"] > arxiv["value"] > most, "in this order"),
    ])  # fmt: skip


def own_best(inputs: Inputs) -> Part:
    """The best of each kind of GPU, if the searches above gave that kind up."""
    searches = inputs.shared(made)
    table = []
    for work, gpu in ((BWB, H100), (BWB, A100), (CHAT, A100), (ARXIV, A100)):
        name = f"{work.partition('-')[0].lower()}_{gpu.partition('-')[0].lower()}"
        goal = sized(work) | {"at_once": 2}
        best = searches.exact(name, work=work, gpus={gpu: 16}, goal=goal)[0]
        table.append({"trace": work, **shown(best)})
    return Part(table)
