"""The page of results of docs/proof.md: faults of hand-offs, clean pairs, and costs of a ledger.

python -m scripts.validate.proof docs/results/proof.md
"""

import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from textwrap import wrap

import click

from jaxinfer.config.run_file import RunFile, load_run_file
from jaxinfer.conformance.faults import all_faults
from jaxinfer.conformance.formats import FORMATS
from jaxinfer.conformance.golden import GoldenModel
from jaxinfer.conformance.layout import Layout, Order
from jaxinfer.conformance.mover import Mover
from jaxinfer.conformance.scenario import MODEL, PAIRS, WIDE, WINDOWED, scenario
from jaxinfer.simulate.run import simulate

# Pairs of layouts drawn besides those that ship, for faults and for clean hand-offs.
DRAWN_FAULTS, DRAWN_CLEAN = 15, 60
MODELLED = "configs/modelled/disaggregated.yaml"
REQUESTS, ROUNDS = 500, 4

Pair = tuple[Layout, Layout, GoldenModel]


def drawn(seed: int, count: int) -> list[Pair]:
    """Pairs of any two layouts, with one of three models."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        model = rng.choice([MODEL, WINDOWED, WIDE])
        found.append((layout(rng, model), layout(rng, model), model))
    return found


def layout(rng: random.Random, model: GoldenModel) -> Layout:
    """Draw a layout."""
    orders: list[Order] = ["HND", "NHD"]
    order = rng.choice(orders)
    return Layout(
        tp=rng.choice([1, 2, model.heads, 2 * model.heads]),
        stages=rng.choice([(), (1, 3), (2, 2), (1, 1, 2)]),
        page_size=rng.choice([8, 16, 24, 64]),
        kv_dtype=rng.choice(list(FORMATS)),
        keys="HDN" if rng.random() < 0.5 else order,
        values=order,
    )


def faults(pairs: list[Pair]) -> tuple[Counter[str], Counter[str], list[str]]:
    """Count faults and those rightly named by name, and put the others into words."""
    made, named, others = Counter[str](), Counter[str](), []
    for fault in all_faults(pairs):
        found = fault.findings()
        made[fault.name] += 1
        if found and found[0].name == fault.name:
            named[fault.name] += 1
        else:
            others.append(f"{fault}: {found[0] if found else 'nothing found'}")
    return made, named, others


def alarms(pairs: list[Pair]) -> int:
    """Clean hand-offs in which something is found."""
    found = 0
    for source, dest, model in pairs:
        case = scenario(source, dest, model)
        found += bool(case.run(Mover(case.source, case.dest)))
    return found


def ledger_cost() -> tuple[float, float, int]:
    """CPU seconds of a simulation without a ledger, and with one, in turns; and its steps."""
    config = load_run_file(MODELLED)
    work = config.requests(lambda text: None)[:REQUESTS]
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * ROUNDS):
        ledger = bool(number % 2)
        asked: RunFile = config.model_copy(update={"ledger": ledger})
        with tempfile.TemporaryDirectory() as folder:
            before = time.process_time()
            metrics = simulate(asked, work, folder)
            seconds[ledger].append(time.process_time() - before)
    return min(seconds[False]), min(seconds[True]), metrics.steps


def page() -> str:
    """The page."""
    shipped, more = list(PAIRS), drawn(1, DRAWN_FAULTS)
    rows = {name: faults(pairs) for name, pairs in (("shipped", shipped), ("drawn", more))}
    lines = [
        "# Proof: results",
        "[What they mean](../proof.md). `python -m scripts.validate.proof FILE` makes this page.",
        "",
        "## Faults of hand-offs",
        f"Between {len(shipped)} pairs of layouts that ship, and {len(more)} drawn by a seed.",
        "",
        "| name | shipped: made | rightly named | drawn: made | rightly named |",
        "|---|---:|---:|---:|---:|",
    ]
    totals = [sum(counts.values()) for made, named, _ in rows.values() for counts in (made, named)]
    for name in sorted(set(rows["shipped"][0]) | set(rows["drawn"][0])):
        cells = [counts[name] for made, named, _ in rows.values() for counts in (made, named)]
        lines.append(f"| {name} | {' | '.join(map(str, cells))} |")
    lines += [f"| all | {' | '.join(map(str, totals))} |", ""]
    for _, _, others in rows.values():
        lines += [line for text in others for line in wrap(f"- {text}", 98)]
    clean = shipped + drawn(2, DRAWN_CLEAN)
    without, with_it, steps = ledger_cost()
    lines += [
        f"Clean hand-offs: {len(clean)} pairs, {alarms(clean)} false alarms.",
        "",
        "## Cost of a ledger in a simulation",
        f"`{MODELLED}`, {REQUESTS:,} requests, {steps:,} steps, least CPU time of\n{ROUNDS}: "
        f"{without:.2f} s without, {with_it:.2f} s with ({with_it / without - 1:+.1%}).",
        "",
    ]
    return "\n".join(lines)


@click.command()
@click.argument("out")
def main(out: str) -> None:
    """Write the page of results of docs/proof.md to a file."""
    Path(out).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
