"""Write the page of results of docs/proof.md.

The page has ledgers, faults of hand-offs, clean pairs, and costs of checks.

    python -m scripts.validate.decisions docs/results/proof/decisions.csv --seed 1
    python -m scripts.validate.proof docs/results/proof.md
"""

import math
import random
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from textwrap import wrap

import click
import jax

from jaxinfer import LLM, SamplingParams
from jaxinfer.config.run_file import RunFile, as_run_file, load_run_file
from jaxinfer.lab.conformance.formats import FORMATS
from jaxinfer.lab.conformance.golden import GoldenModel
from jaxinfer.lab.conformance.layout import KVLayout, Order
from jaxinfer.lab.conformance.mover import Mover
from jaxinfer.runtime.kv.slab import SLAB_TOKENS, SlabSource
from jaxinfer.runtime.stage.stage import Stage
from jaxinfer.simulate.run import simulate
from jaxinfer.text.prompts import TokensPrompt
from scripts.tables import write_csv
from scripts.validate.decisions import KINDS, runs_with, summary
from scripts.validate.faults.registry import all_faults
from scripts.validate.faults.scenario import MODEL, PAIRS, WIDE, WINDOWED, scenario

# Numbers of drawn pairs of layouts, in addition to those that ship, for faults and for clean
# hand-offs.
DRAWN_FAULTS, DRAWN_CLEAN = 15, 60
MODELLED = "configs/modelled/disaggregated.yaml"
REQUESTS, ROUNDS = 500, 12
SERVED = "smollm2-135m-instruct"
PROMPTS, PROMPT, OUTPUT = 4, 256, 64

# Paragraphs of the page.
INTRODUCTION = (
    "This page has the results of the tests that [the page on proofs](../proof.md) explains. "
    "`python -m scripts.validate.proof FILE.md` writes it."
)
LEDGERS = (
    "All systems served nine workloads in real runs of a tiny model, and the simulator repeated "
    "each run from its ledger, the file with all scheduling decisions."
)
FAULTS = (
    "The check of hand-offs sends KV between two configurations, and must find each deliberate "
    "fault and name its kind. Configurations differ in page size, data type, KV layout, tensor "
    "parallelism and pipeline stages."
)
COSTS = (
    "The table has the CPU time that two options add to a run. For the ledger, it is the median, "
    "with the quartiles in brackets, of pairs of runs with and without the option."
)

Pair = tuple[KVLayout, KVLayout, GoldenModel]
Found = tuple[Counter[str], Counter[str], list[str]]


def drawn(seed: int, count: int) -> list[Pair]:
    """Draw pairs of any two layouts, with one of three models."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        model = rng.choice([MODEL, WINDOWED, WIDE])
        found.append((layout(rng, model), layout(rng, model), model))
    return found


def layout(rng: random.Random, model: GoldenModel) -> KVLayout:
    """Draw a layout."""
    orders: list[Order] = ["HND", "NHD"]
    order = rng.choice(orders)
    return KVLayout(
        tp=rng.choice([1, 2, model.heads, 2 * model.heads]),
        stages=rng.choice([(), (1, 3), (2, 2), (1, 1, 2)]),
        page_size=rng.choice([8, 16, 24, 64]),
        kv_dtype=rng.choice(list(FORMATS)),
        keys="HDN" if rng.random() < 0.5 else order,
        values=order,
    )


def faults(pairs: list[Pair]) -> Found:
    """Count faults and those named correctly, by name, and describe the others."""
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
    """Return the number of clean hand-offs in which something is found."""
    found = 0
    for source, dest, model in pairs:
        case = scenario(source, dest, model)
        found += bool(case.run(Mover(case.source, case.dest)))
    return found


def ledger_cost() -> tuple[float, list[float], int]:
    """Measure simulations with and without a ledger.

    Returns:
        CPU seconds without a ledger, the shares that a ledger adds, and the number of steps.
    """
    config = load_run_file(MODELLED)
    work = config.requests(lambda text: None)[:REQUESTS]
    steps = 0

    def simulation(ledger: bool) -> Callable[[Callable[[], None]], None]:
        asked: RunFile = config.model_copy(update={"ledger": ledger})

        def go(pause: Callable[[], None]) -> None:
            nonlocal steps
            with tempfile.TemporaryDirectory() as folder:
                steps = simulate(asked, work, folder, lambda request, times: pause()).steps

        return go

    plain, shares = [], []
    for number in range(2 * ROUNDS):
        order = (False, True) if number % 2 else (True, False)
        seconds = dict(zip(order, in_turns(*map(simulation, order)), strict=True))
        plain.append(seconds[False])
        shares.append(seconds[True] / seconds[False])
    # The first job also pays for the other one, so both orders count equally.
    both = [math.sqrt(one * other) - 1 for one, other in batched_pairs(shares)]
    return min(plain), both, steps


def batched_pairs(values: list[float]) -> list[tuple[float, float]]:
    """Return pairs of neighbours."""
    return list(zip(values[::2], values[1::2], strict=True))


def in_turns(
    one: Callable[[Callable[[], None]], None], other: Callable[[Callable[[], None]], None]
) -> tuple[float, float]:
    """Return the CPU seconds of two jobs that take turns, so that other work slows both.

    Args:
        one: job that calls its argument wherever the other job may continue.
        other: the other job, which does the same.
    """
    gates = threading.Semaphore(1), threading.Semaphore(0)
    seconds, ended = [0.0, 0.0], [False, False]

    def run(number: int, job: Callable[[Callable[[], None]], None]) -> None:
        mine, theirs = gates[number], gates[1 - number]

        def pause() -> None:
            if not ended[1 - number]:
                theirs.release()
                mine.acquire()

        mine.acquire()
        before = time.thread_time()
        try:
            job(pause)
        finally:
            seconds[number], ended[number] = time.thread_time() - before, True
            theirs.release()

    threads = [threading.Thread(target=run, args=each) for each in enumerate((one, other))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seconds[0], seconds[1]


def verify_cost() -> tuple[float, float]:
    """Return the CPU seconds of a run, and those that ``verify_transfers`` would add to it.

    The difference of two runs would be mostly noise. The work of verification is known. Each slab
    needs a checksum at the source. At the destination, it needs a read of the pages, and a
    checksum.
    """
    engine = {"page_size": 16, "max_num_seqs": 8, "max_num_batched_tokens": PROMPT,
              "num_pages": 200, "max_model_len": PROMPT + OUTPUT,
              "enable_prefix_caching": False}  # fmt: skip
    ends = {"prefill": ["p"], "decode": ["d"]}
    run_file = {
        "model": SERVED,
        "engine": engine,
        "groups": {"p": {}, "d": {}},
        "instances": {"p": {"group": "p"}, "d": {"group": "d"}},
        "system": {"name": "disaggregated", **ends},
    }
    rng = random.Random(0)
    prompts: list[TokensPrompt] = [
        {"prompt_token_ids": [rng.randrange(1000, 20_000) for _ in range(PROMPT)]}
        for _ in range(PROMPTS)
    ]
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
    llm = LLM.from_config(as_run_file(run_file), progress=False)
    run_s = [cpu_seconds(lambda: llm.generate(prompts, params, progress=False)) for _ in range(3)]
    (pair,) = llm.cluster.channels["p", "d"].pairs
    (stage,) = llm.cluster.engines["d"].worker.stages
    assert isinstance(stage, Stage)
    table = list(range(1, 1 + -(-PROMPT // 16)))
    both = [SlabSource(stage, pair.form, verify) for verify in (True, False)]

    def taken(source: SlabSource) -> float:
        return cpu_seconds(lambda: jax.block_until_ready(source.take(table, 0, PROMPT)))

    (summed, plain) = (statistics.median([taken(end) for _ in range(60)][10:]) for end in both)
    slabs = PROMPTS * -(-PROMPT // SLAB_TOKENS)
    return min(run_s[1:]), slabs * (summed + (summed - plain))


def cpu_seconds(work: Callable[[], object]) -> float:
    """Return the CPU seconds of all threads."""
    before = time.process_time()
    work()
    return time.process_time() - before


def by_name(found: Mapping[str, Found]) -> list[dict[str, str | int]]:
    """Return a row per name: numbers of faults and of correct names, by group of pairs."""
    names = sorted({name for made, _, _ in found.values() for name in made})
    return [
        {
            "name": name,
            **{f"{of}_faults": made[name] for of, (made, _, _) in found.items()},
            **{f"{of}_rightly_named": named[name] for of, (_, named, _) in found.items()},
        }
        for name in names
    ]


def page(tables: Path) -> str:
    """Return the page; write its faults by name to a folder."""
    pairs = {"shipped": list(PAIRS), "drawn": drawn(1, DRAWN_FAULTS)}
    found = {of: faults(some) for of, some in pairs.items()}
    tables.mkdir(exist_ok=True)
    write_csv(tables / "faults.csv", by_name(found))
    words = (f"{len(PAIRS)} fixed pairs", f"{DRAWN_FAULTS} random pairs")
    lines = [
        "# Proof: results",
        *wrap(INTRODUCTION, 100),
        "",
        "## Ledgers",
        *wrap(
            f"{LEDGERS} {summary(tables / 'decisions.csv')} Each run is a row of "
            f"[decisions.csv]({tables.name}/decisions.csv).",
            100,
        ),
        "",
        "| what happens | runs in which it happens |",
        "|---|---:|",
        *(
            f"| {words} | {runs_with(tables / 'decisions.csv')[kind]} |"
            for kind, words in KINDS.items()
        ),
        "",
        "## Faults of hand-offs",
        *wrap(FAULTS, 100),
        "",
        "| configurations of the two sides | faults | named correctly | kinds |",
        "|---|---:|---:|---:|",
    ]
    for of, (made, named, _) in zip(words, found.values(), strict=True):
        lines.append(f"| {of} | {made.total()} | {named.total()} | {len(made)} |")
    lines += ["", f"[faults.csv]({tables.name}/faults.csv) has the numbers for each name.", ""]
    for _, _, others in found.values():
        lines += [line for text in others for line in wrap(f"- {text}", 98)]
    clean = pairs["shipped"] + drawn(2, DRAWN_CLEAN)
    ledger_s, ledger, steps = ledger_cost()
    verify_s, verify = verify_cost()
    lines += [
        *wrap(
            f"The check was also run on {len(clean)} hand-offs without a fault, and gave "
            f"{alarms(clean)} false alarms.",
            100,
        ),
        "",
        "## Costs",
        *wrap(COSTS, 100),
        "",
        "| option | run | CPU time without the option | added by the option |",
        "|---|---|---:|---:|",
        f"| `--ledger` | a simulation of `{MODELLED}` with {REQUESTS:,} requests and {steps:,} "
        f"steps, which writes all its files | {ledger_s:.2f} s | {added(ledger)} |",
        f"| `verify_transfers` | {PROMPTS} prompts of {PROMPT} tokens, handed off between "
        f"instances of {SERVED}, with answers of {OUTPUT} tokens | {verify_s:.1f} s | "
        f"{verify / verify_s:+.1%} |",
        "",
    ]
    return "\n".join(lines)


def added(shares: list[float]) -> str:
    """Return the median and the quartiles as text."""
    low, middle, high = statistics.quantiles(shares, n=4)
    return f"{middle:+.1%} ({low:+.1%} to {high:+.1%})"


@click.command()
@click.argument("out")
def main(out: str) -> None:
    """Write the page of results of docs/proof.md to OUT, such as x.md, and its table into x/."""
    if not Path(out).suffix:
        raise click.BadParameter(f"{out} is the folder of the table; name the page {out}.md")
    Path(out).write_text(page(Path(out).with_suffix("")), encoding="utf-8")


if __name__ == "__main__":
    main()
