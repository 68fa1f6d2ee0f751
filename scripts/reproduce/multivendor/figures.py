"""The multi-vendor paper's figures on modelled cards, compared with its claims.

All lengths are the paper's. Arrivals are drawn (Poisson).
"""

import statistics
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

from matplotlib.figure import Figure

from jaxinfer.report.plots import COLOURS
from scripts.reproduce.claims import Target, agrees, by_share, holds
from scripts.reproduce.multivendor.cases import DecodeCard, ServedTimes, VendorCase, serve_all
from scripts.reproduce.reproduction import Inputs, Part
from scripts.tables import Row

STEADY = [
    ((256, 256), 2, 1),
    ((256, 256), 2, 2),
    ((256, 256), 2, 3),
    ((256, 256), 15, 1),
    ((512, 1024), 1.5, 1),
    ((512, 1024), 5, 3),
    ((1024, 1024), 1, 1),
    ((1024, 1024), 3, 3),
]


def steady_states(inputs: Inputs) -> Part:
    """The closed form of TPOT, compared with simulations of 2,500 requests."""
    pool = inputs.pool
    card = DecodeCard.of_file()
    cases = [VendorCase(lengths, rate, 1, decodes, 2500) for lengths, rate, decodes in STEADY]
    rows, targets = [], []
    for case, served in zip(cases, serve_all(pool, cases), strict=True):
        closed = card.tpot(case.lengths, case.rate / case.decodes)
        name = f"{case.lengths[0]}+{case.lengths[1]}, {case.rate:g}/s, {case.decodes} D"
        rows.append(
            {
                "setup": name,
                "closed_ms": round(1e3 * closed, 2),
                "simulated_ms": round(1e3 * served.steady_tpot, 2),
                "difference_percent": round(100 * (served.steady_tpot / closed - 1), 1),
            }
        )
        claim = f"TPOT by w / (1 - q L_out k), ms: {name}"
        targets.append(by_share(claim, 1e3 * closed, 1e3 * served.steady_tpot, 0.05, "consistency"))
    return Part(rows, targets)


RATIOS = [(1, 1), (2, 1), (3, 1), (1, 2), (1, 3)]


def ratios(inputs: Inputs) -> Part:
    """Figure 7: 256 + 256 tokens at 2 requests per second."""
    pool = inputs.pool
    cases = [VendorCase((256, 256), 2, p, d) for p, d in RATIOS]
    served = dict(zip(RATIOS, serve_all(pool, cases), strict=True))
    rows = [
        {
            "prefill:decode": f"{p}P{d}D",
            "ttft_ms": round(1e3 * s.ttft, 1),
            "tpot_ms": round(1e3 * s.tpot, 2),
            "tokens_s": round(s.tokens_s),
            "tokens_s_per_card": round(s.tokens_s / (p + d)),
            "request_tokens_s": round(s.rate, 1),
        }
        for (p, d), s in served.items()
    ]
    tpot = [1e3 * served[1, d].tpot for d in (1, 2, 3)]
    ttft = [1e3 * served[p, 1].ttft for p in (1, 2, 3)]
    each = [served[1, d].rate for d in (1, 2, 3)]
    targets = [
        holds(
            "Fig. 7: TPOT falls with decode instances, not in proportion (ms of 1, 2, 3 D)",
            "falls, not in proportion",
            _list(tpot, 2),
            tpot[0] > tpot[1] > tpot[2] > tpot[0] / 2,
            "falls twice, by less than half in all",
        ),
        holds(
            "Fig. 7: TTFT falls slightly with prefill instances (ms of 1, 2, 3 P)",
            "falls slightly",
            _list(ttft, 1),
            ttft[0] > ttft[1] >= ttft[2] > ttft[0] / 2,
            "falls, and then does not rise, by less than half in all",
        ),
        holds(
            "Fig. 7: a third instance adds no throughput to a second (a request's tokens/s, "
            "1, 2, 3 D)",
            "1P2D = 1P3D > 1P1D",
            _list(each, 1),
            each[0] < each[1] and abs(each[2] / each[1] - 1) <= 0.02,
            "a second adds some, a third changes it by at most 2 %",
        ),
    ]
    return Part(rows, targets, {"ratios": draw(rows)})


def _list(values: Sequence[float], digits: int) -> str:
    return ", ".join(f"{value:.{digits}f}" for value in values)


# Lengths, rate, and the paper's figures for one card and for two.
GAINS = {"Fig. 9": ((512, 1024), 3, 19.3, 22.6), "Fig. 10": ((1024, 1024), 2, 19.2, 25.0)}
SEEDS = range(4)
# Run files, and their numbers of cards.
SETUPS = {
    "A alone": ("single", 1),
    "B for prompts, A for decodes": ("disaggregated", 2),
    "A and B, whole requests": ("two_alone", 2),
    "A and A, whole requests": ("two_equal", 2),
}


def gains(inputs: Inputs) -> Part:
    """Figures 9 and 10: one card against two, and two against two."""
    pool = inputs.pool
    rows: list[Row] = []
    for name, (lengths, rate, _, _) in GAINS.items():
        for count in (100, 200, 400):
            cases = [
                VendorCase(lengths, rate, requests=count, seed=seed, file=file)
                for file, _ in SETUPS.values()
                for seed in SEEDS
            ]
            served = iter(serve_all(pool, cases))
            for setup, (_, cards) in SETUPS.items():
                of_setup = [next(served) for _ in SEEDS]
                if cards == 1:
                    alone = of_setup
                rows.append(_row(name, count, setup, cards, of_setup, alone))
    return Part(rows, [*_gain_targets(rows), *_ttft_targets(pool)])


def _row(
    name: str,
    count: int,
    setup: str,
    cards: int,
    served: Sequence[ServedTimes],
    alone: Sequence[ServedTimes],
) -> Row:
    each = [100 * (a.rate / b.rate - 1) for a, b in zip(served, alone, strict=True)]
    rate, one = (statistics.fmean(s.rate for s in some) for some in (served, alone))
    tokens_s = statistics.fmean(s.tokens_s for s in served)
    return {
        "figure": name,
        "requests": count,
        "setup": setup,
        "request_tokens_s": round(rate, 1),
        "gain_percent": round(100 * (rate / one - 1), 1),
        "seeds": f"{min(each):+.0f} to {max(each):+.0f}",
        "gain_per_card_percent": round(100 * (rate / one / cards - 1), 1),
        "tokens_s": round(tokens_s),
        "tokens_s_per_card": round(tokens_s / cards),
        "ttft_s": round(statistics.fmean(s.ttft for s in served), 2),
    }


def _gain_targets(rows: Sequence[Row]) -> list[Target]:
    found = {
        row["figure"]: row["gain_percent"]
        for row in rows
        if row["requests"] == 200 and row["setup"].startswith("B for")
    }
    targets = []
    for name, (lengths, rate, alone, pair) in GAINS.items():
        paper, ours = 100 * (pair / alone - 1), found[name]
        claim = f"{name}: gain in a request's tokens/s, {lengths[0]}+{lengths[1]} at {rate}/s, %"
        met = paper / 2 <= ours <= 2 * paper
        targets.append(
            Target(claim, round(paper), "", ours, "sign, and a factor of 2", "", "predicted", met)
        )
    both = f"{found['Fig. 10']:+.0f} and {found['Fig. 9']:+.0f} %"
    larger = found["Fig. 10"] > found["Fig. 9"]
    return [
        *targets,
        holds("Fig. 10's gain is the larger one", "+30 and +17 %", both, larger, "larger"),
    ]


def _ttft_targets(pool: ProcessPoolExecutor) -> list[Target]:
    """Compare TTFT of one card and of the pair, by both readings of the first token's card."""
    targets = []
    for name, (lengths, rate, _, _) in GAINS.items():
        case = VendorCase(lengths, rate, requests=200)
        one, with_transfer, without = serve_all(
            pool, [replace(case, file="single"), case, replace(case, counts_transfer=False)]
        )
        for what, served in (
            ("drawn by the card that decodes", with_transfer),
            ("drawn by the card with the prompt", without),
        ):
            claim = f"{name}: a tenth of one card's TTFT, where the first token is {what} (s)"
            found = f"{one.ttft:.2f} to {served.ttft:.2f}"
            targets.append(agrees(claim, found, served.ttft < one.ttft / 10, "less than a tenth"))
    return targets


def slow_prefill(inputs: Inputs) -> Part:
    """Figure 8's sentence on TTFT (1024 + 1024 at 3 requests per second), by B's efficiency."""
    pool = inputs.pool
    shares = (0.6, 0.12, 0.08, 0.06)
    cases = [
        VendorCase((1024, 1024), 3, p, 4, b_flops=share) for share in shares for p in (1, 2, 3)
    ]
    served = iter(serve_all(pool, cases))
    rows = []
    for share in shares:
        ttft = [next(served).ttft for _ in range(3)]
        rows.append(
            {"share_of_peak": share, **{f"ttft_s_{p}P": round(t, 2) for p, t in enumerate(ttft, 1)}}
        )
    collapse = [row["share_of_peak"] for row in rows if row["ttft_s_1P"] > 3 * row["ttft_s_2P"]]
    target = holds(
        "Fig. 8: one prefill instance cannot handle the load (TTFT of 1P over 3 times that of 2P)",
        "cannot",
        f"only at {_list(collapse, 2)} of its peak",
        0.6 in collapse,
        "so at 0.6 of its peak",
    )
    return Part(rows, [target])


def lengths_matter(pool: ProcessPoolExecutor) -> list[Target]:
    """Return targets of Figure 6: 1P1D at 2 requests per second."""
    grid = [(i, o) for i in (128, 256, 512) for o in (128, 256, 512)]
    served = dict(zip(grid, serve_all(pool, [VendorCase(each, 2) for each in grid]), strict=True))
    tpot = {each: s.tpot for each, s in served.items()}
    by_input = all(tpot[128, o] < tpot[256, o] < tpot[512, o] for o in (128, 256, 512))
    by_output = all(tpot[i, 128] < tpot[i, 256] < tpot[i, 512] for i in (128, 256, 512))
    apart = [
        max(served[i, o].ttft for o in (128, 256, 512))
        / min(served[i, o].ttft for o in (128, 256, 512))
        - 1
        for i in (128, 256, 512)
    ]
    return [
        holds(
            "Fig. 6: TPOT grows with input and with output",
            "grows",
            f"{1e3 * tpot[128, 128]:.2f} to {1e3 * tpot[512, 512]:.2f} ms",
            by_input and by_output,
            "in each row and column",
        ),
        holds(
            "Fig. 6: TTFT is the same for the same input",
            "same",
            f"within {100 * max(apart):.1f} %",
            max(apart) < 0.02,
            "within 2 %",
        ),
    ]


def draw(rows: Sequence[Row]) -> Figure:
    """Throughput per card over the ratios; latencies, which hardly differ, as text."""
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    ax = figure.subplots()
    names = [
        f"{row['prefill:decode']}\nTTFT {row['ttft_ms']:g} ms\nTPOT {row['tpot_ms']:g} ms"
        for row in rows
    ]
    bars = ax.bar(names, [row["tokens_s_per_card"] for row in rows], color=COLOURS[0])
    ax.bar_label(bars, fmt="%.0f")
    ax.set_ylabel("output tokens/s per card")
    spreads = [[row[name] for row in rows] for name in ("ttft_ms", "tpot_ms")]
    little = all(max(values) < 1.15 * min(values) for values in spreads)
    title = "At this load, more cards of either kind change latencies little"
    ax.set_title(title if little else "Throughput and latencies by cards of each kind", fontsize=10)
    ax.margins(y=0.12)
    return figure


def conforming(rows: Sequence[Row]) -> list[Target]:
    """Return the target of the paper's claim that KV crosses, from the table of all pairs."""
    tried = [row for row in rows if row["verdict"] != "refused"]
    verdicts = Counter(row["verdict"] for row in tried)
    wide = [
        row
        for row in tried
        if all(
            row[f"{end}_dtype"] == "float32" and row[f"{end}_kv_cache_dtype"] == "auto"
            for end in ("source", "dest")
        )
    ]
    tokens = Counter(row["same_tokens"] for row in wide)
    most = max(tokens)
    return [
        agrees(
            "KV crosses unlike dtype, pages, layout, TP and PP",
            f"{verdicts['exact']} of {len(tried)} pairs exact, {verdicts['rounds']} within their "
            f"formats' bounds, {verdicts['wrong']} wrong",
            not verdicts["wrong"],
            "none is wrong",
        ),
        agrees(
            "Tokens as of one instance (float32 on both sides)",
            f"{tokens[most]} of {len(wide)} pairs, {most} tokens each",
            len(tokens) == 1,
            "all are",
        ),
    ]
