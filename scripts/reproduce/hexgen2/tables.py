"""HexGen-2's Tables 3 and 4 by simulation."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from matplotlib.figure import Figure

from jaxinfer.report.plots import COLOURS
from scripts.reproduce.claims import by_share
from scripts.reproduce.hexgen2.runs import (
    CLASSES,
    LOAD,
    SLOW,
    TABLE_2,
    TRACE,
    WORKLOADS,
    HexGen2Engine,
    Planned,
    alike,
    both,
    colocated,
    draw,
    fixed,
    of_class,
    planned,
    poisson,
    requests_s,
    throughput,
    tokens_s,
)
from scripts.reproduce.reproduction import Inputs, Part
from scripts.tables import Row

# Tokens per second: HPLD, HPHD, LPHD, LPLD, and online in Table 3.
TABLE_3 = (157, 448, 689, 570, 350)
TABLE_4 = (365, 683, 758, 730)
HEXGEN_4 = (277, 505, 533, 545)
DISTSERVE_3 = (128, 368, 553, 291, 251)
# The calibrated number, and its neighbours.
STEPS_S = (0.015, 0.018, 0.020, 0.025)
# Table 4's plan: four H100s, of which two prefill and two decode.
PAIR = [*alike("prefill", 1, 2), *alike("decode", 1, 2)]
# The paper does not describe DistServe's plan for eight H100s.
EIGHT = {
    "prefill TP4, decode TP4": [*alike("prefill", 1, 4), *alike("decode", 1, 4)],
    "prefill TP4, decode TP2 PP2": [*alike("prefill", 1, 4), *alike("decode", 1, 2, 2)],
    "2 x prefill TP2, decode TP4": [*alike("prefill", 2, 2), *alike("decode", 1, 4)],
}


def classes(inputs: Inputs) -> Part:
    """Shares and mean lengths of the trace's classes."""
    trace = inputs.work(TRACE)
    rows = []
    for name in WORKLOADS:
        work = of_class(trace, name)
        rows.append(
            {
                "class": "all" if name == "online" else name,
                "share (%)": round(100 * len(work) / len(trace), 1),
                "prompt": round(fmean(item.prompt_len for item in work)),
                "output": round(fmean(item.max_tokens for item in work)),
            }
        )
    return Part(rows)


def off(ours: float, theirs: float) -> int:
    """Return by how many percent ours is above theirs."""
    return round(100 * (ours / theirs - 1))


def step_seconds(inputs: Inputs) -> Part:
    """Effect of the calibrated number on the cell that it is fitted to."""
    trace, clusters = both(inputs)
    work = draw(trace, "HPHD")
    return Part(
        [
            {
                "step_s": step_s,
                "paper": TABLE_4[1],
                "ours": round(
                    throughput(fixed(clusters.four_h100(HexGen2Engine(step_s)), work, PAIR), "HPHD")
                ),
            }
            for step_s in STEPS_S
        ]
    )


def table_4(inputs: Inputs) -> Part:
    """OPT-30B: one cell is calibrated, three are predicted."""
    trace, clusters = both(inputs)
    rows, targets = [], []
    for name, theirs in zip(CLASSES, TABLE_4, strict=True):
        work = draw(trace, name)
        plan, best = fixed(clusters.four_h100(), work, PAIR), planned(clusters.four_h100(), work)
        ours = throughput(plan, name)
        small = fixed(clusters.four_h100(HexGen2Engine(prefill_tokens=2048)), work, PAIR)
        rows.append(
            {
                "class": name,
                "paper": theirs,
                "ours": round(ours),
                "off (%)": off(ours, theirs),
                "prefill by 2,048": round(throughput(small, name)),
                "our own plan": round(throughput(best, name)),
                "which": best.words,
            }
        )
        claim = f"Table 4, OPT-30B, {name} (tokens/s)"
        if name == "HPHD":
            targets.append(by_share(claim, theirs, ours, 0.05, "calibrated"))
        else:
            targets.append(by_share(claim, theirs, ours, 0.15))
    return Part(rows, targets)


def table_3(inputs: Inputs) -> Part:
    """Llama-2-70B in setting 1 by Table 2's plan, with each unknown changed in turn."""
    trace, clusters = both(inputs)
    rows, targets, found = [], [], []
    fast = clusters.setting("heterogeneous_1")
    slow, small = (
        clusters.setting("heterogeneous_1", nic_gb_s=SLOW),
        HexGen2Engine(prefill_tokens=2048),
    )
    for name, theirs in zip(WORKLOADS, TABLE_3, strict=True):
        work = draw(trace, name)
        ours = throughput(fixed(fast, work, TABLE_2), name)
        found.append(ours)
        changed = {
            "equal shares": fixed(fast, work, TABLE_2, equal=True),
            "10 Gb/s": fixed(slow, work, TABLE_2),
            "16 at once": fixed(replace(fast, engine=HexGen2Engine(seqs=16)), work, TABLE_2),
            "64 at once": fixed(replace(fast, engine=HexGen2Engine(seqs=64)), work, TABLE_2),
            "no step_s": fixed(replace(fast, engine=HexGen2Engine(0.0)), work, TABLE_2),
            "prefill by 2,048": fixed(replace(fast, engine=small), work, TABLE_2),
            "our own plan": planned(fast, work),
        }
        row: Row = {
            "class": name,
            "paper": theirs,
            "ours": round(ours),
            "off (%)": off(ours, theirs),
        }
        rows.append(row | {what: round(throughput(p, name)) for what, p in changed.items()})
        claim = f"Table 3, Llama-2-70B in setting 1, {name} (tokens/s)"
        targets.append(by_share(claim, theirs, ours, 0.25))
    claim = "Table 3, Llama-2-70B in setting 1, mean of the five (tokens/s)"
    targets.append(by_share(claim, fmean(TABLE_3), fmean(found), 0.1))
    return Part(rows, targets)


def whole_runs(inputs: Inputs) -> Part:
    """The same runs from the first request to the last one's end, with ramp and drain."""
    trace, clusters = both(inputs)
    rows: list[Row] = []
    setting = clusters.setting("heterogeneous_1")
    for number, name in enumerate(CLASSES):
        work = draw(trace, name)
        row: Row = {"class": name}
        for table, plan, theirs in (
            ("Table 3", fixed(setting, work, TABLE_2), TABLE_3),
            ("Table 4", fixed(clusters.four_h100(), work, PAIR), TABLE_4),
        ):
            found = plan.saturated()
            ours, whole = tokens_s(found), found.output_tok_s
            row |= {
                f"{table}: paper": theirs[number],
                f"{table}: ours": round(ours),
                f"{table}: whole run": round(whole),
            }
        rows.append(row)
    return Part(rows)


def distserve(inputs: Inputs) -> Part:
    """Eight H100s under plans that DistServe may have had."""
    trace, clusters = both(inputs)
    rows = []
    for name, theirs in zip(WORKLOADS, DISTSERVE_3, strict=True):
        work, row = draw(trace, name), {"class": name, "paper": theirs}
        for words, plan in EIGHT.items():
            found = fixed(clusters.setting("homogeneous"), work, plan)
            row[words] = round(throughput(found, name))
        rows.append(row)
    return Part(rows)


def hexgen(inputs: Inputs) -> Part:
    """Whole requests on instances of the same four H100s, for HexGen."""
    trace, clusters = both(inputs)
    rows, targets = [], []
    ways = {"1 x TP4": (1, 4), "2 x TP2": (2, 2)}
    for name, theirs, alone in zip(CLASSES, TABLE_4, HEXGEN_4, strict=True):
        work = draw(trace, name)
        pair = fixed(clusters.four_h100(), work, PAIR)
        ours, ratio = throughput(pair, name), theirs / alone
        row: Row = {"class": name, "paper": round(ratio, 2)}
        for words, (count, tp) in ways.items():
            for seqs in (32, 64):
                whole = throughput(_whole(pair, count, tp, seqs), name)
                row[f"{words}, {seqs} at once"] = round(ours / whole, 2)
        rows.append(row)
        first = row["1 x TP4, 32 at once"]
        claim = f"Table 4, {name}: HexGen-2 by HexGen, here whole requests on one TP4 instance"
        targets.append(by_share(claim, round(ratio, 2), first, 0.15))
    return Part(rows, targets)


def _whole(like: Planned, count: int, tp: int, seqs: int) -> Planned:
    names = [f"g{number}" for number in range(count)]
    part = {
        "groups": {name: {"kind": "H100-SXM", "devices": tp} for name in names},
        "simulate": {"groups": {name: {"node": "h100"} for name in names}},
        "instances": {f"i{name}": {"stages": [{"group": name}]} for name in names},
    }
    return colocated(replace(like, part=part), seqs=seqs)


def latencies(inputs: Inputs) -> Part:
    """Online latency of Table 2's plan, and of whole requests on the same instances."""
    trace, clusters = both(inputs)
    work = draw(trace, "online")
    plan = fixed(clusters.setting("heterogeneous_1"), work, TABLE_2)
    rate = LOAD * requests_s(plan.saturated())
    at_rate = poisson(work, rate)
    rows: list[Row] = []
    for words, each in (("prefill and decode apart", plan), ("whole requests", colocated(plan))):
        found = each.run(at_rate)
        assert found.e2e_mean is not None
        rows.append(
            {
                "what": words,
                "requests/s": round(rate, 2),
                "latency, mean (s)": round(found.e2e_mean, 1),
                "tokens/s": round(tokens_s(found)),
            }
        )
    apart, whole = (row["latency, mean (s)"] for row in rows)
    claim = "setting 1, online: HexGen's latency by HexGen-2's, here that of whole requests"
    return Part(rows, [by_share(claim, 1.5, whole / apart, 0.15)])


def draw_tables(three: Sequence[Row], four: Sequence[Row]) -> Figure:
    """Draw bars of the paper's figures and ours."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    titles = "Table 3: Llama-2-70B, setting 1", "Table 4: OPT-30B, four H100s"
    for ax, rows, title in zip(figure.subplots(1, 2), (three, four), titles, strict=True):
        for number, what in enumerate(("paper", "ours", "our own plan")):
            places = [place + 0.27 * (number - 1) for place in range(len(rows))]
            ax.bar(
                places,
                [row[what] for row in rows],
                0.25,
                color=COLOURS[number],
                label={"ours": "ours, its plan"}.get(what, what),
            )
        ax.set_xticks(range(len(rows)), [row["class"] for row in rows])
        ax.set_title(title, fontsize=10)
        ax.set_ylabel("tokens/s")
        ax.grid(axis="y", alpha=0.3)
    figure.axes[0].legend(fontsize=8)
    return figure
