"""Compare ledgers of real runs with the simulator's decisions; see docs/proof.md.

python -m scripts.validate.decisions docs/results/proof/decisions.csv --seed 1
"""

import gc
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import click
import jax

from jaxinfer import LLM
from jaxinfer.config.run_file import as_run_file
from jaxinfer.errors import one_line
from jaxinfer.lab.validate.same_decisions import check_decisions
from jaxinfer.ledger.ledger_file import NAME, Entry, read_ledger
from jaxinfer.report.records import read_run_json
from jaxinfer.runtime.processes import process
from jaxinfer.runtime.processes.pipeline_worker import PipelineWorker
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.world import StepDone
from jaxinfer.steps import profile
from jaxinfer.text.prompts import TokensPrompt
from scripts.tables import Row, read_csv, write_csv
from scripts.validate.decision_cases import (
    CLUSTERS,
    MODEL,
    SYSTEMS,
    WORKLOADS,
    asked,
    sections,
    wait_for,
)

COUNTS = "entries", "preemptions", "transfers", "slice_moves", "cached_tokens"
# Kinds of decisions, and of events that lead to some; a matrix must have all of them.
KINDS = {
    "admissions": "a request is admitted",
    "chunks": "a prompt is computed in several chunks",
    "hand_offs": "KV is handed off to another instance",
    "preemptions": "a request is preempted",
    "reassignments": "a request that has started gets a new route",
    "slice_moves": "KV heads move to another device",
    "role_changes": "an instance changes its role",
    "prefix_hits": "the beginning of a prompt is found in the prefix cache",
    "halves": "a batch is computed in two halves",
    "stops": "a request ends at a stop token or stop text",
    "losses": "an instance is lost",
    "returns": "a lost instance returns",
    "without_shards": "an instance continues without a lost attention group",
}
_OF_ENTRIES = {
    "send": "hand_offs", "victim": "preemptions", "role": "role_changes", "lost": "losses",
    "back": "returns", "without": "without_shards",
}  # fmt: skip
COLUMNS = (
    "seed", "system", "workload", *COUNTS, "lost", "back", "finished", "kinds", "difference",
)  # fmt: skip


def ledgers(system: str, workloads: Sequence[str], seed: int, folder: Path) -> Iterator[Row]:
    """Run workloads on a system; a cluster is loaded once for all of its workloads."""
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    by_cluster: dict[str, list[str]] = {}
    for name in workloads:
        by_cluster.setdefault(WORKLOADS[name][0], []).append(name)
    for cluster, names in by_cluster.items():
        data = {"model": str(model)} | sections(system, cluster, seed)
        llm = LLM.from_config(as_run_file(data), progress=False)
        for number, name in enumerate(names, 1):
            runs = folder / f"{seed} {system} {cluster}"
            serve(llm, random.Random(f"{seed} {system} {name}"), name, runs)
            yield {"seed": seed, "system": system, "workload": name} | outcome(runs / str(number))
        del llm
        gc.collect()
        jax.clear_caches()


def serve(llm: LLM, rng: random.Random, workload: str, runs: Path) -> None:
    """Serve a workload's requests into the next folder of its runs."""
    _, drawn, happens = WORKLOADS[workload]
    llm.reset_prefix_cache()
    given = asked(rng, drawn)
    if happens == "cancelled":
        prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt, _ in given]
        outputs = llm.generate_iter(
            prompts, [params for _, params in given], progress=False, run_dir=runs
        )
        for _ in range(rng.randint(1, 4)):
            next(outputs)
        outputs.close()
        return
    requests: list[RequestState] = []
    for number, (prompt, params) in enumerate(given):
        made = llm.make_requests(str(number), prompt, params)
        for request in made:
            if happens == "over time":
                request.arrival = rng.random() / 4
                request.after_ends = max(number - 5, 0)
        requests += made
    on_step = losing(llm, rng) if happens == "lost" else lambda done: None
    llm.run(requests, lambda output: None, progress=False, run_dir=runs, on_step=on_step)


def losing(llm: LLM, rng: random.Random) -> Callable[[StepDone], None]:
    """Kill a process after some steps, and wait after some more steps until it is back."""
    restarts = llm.cluster.restarts
    assert restarts
    name = rng.choice([*llm.cluster.engines])
    worker = llm.cluster.engines[name].worker
    steps, first, more = 0, rng.randint(3, 9), rng.choice([0, 0, 2, 5])
    # It continues without its attention group in the meantime.
    if isinstance(worker, PipelineWorker) and not worker.needs_all:
        home: Any = restarts._homes["d"]
        (at,) = home.processes.values()
    else:
        home = restarts._of[name]
        at = worker.processes[-1] if isinstance(worker, PipelineWorker) else worker.process  # type: ignore[union-attr]
        if len(llm.cluster.engines) == 1:
            more = 0  # No step ends until it has returned.

    def on_step(done: StepDone) -> None:
        nonlocal steps
        steps += 1
        if steps == first:
            os.kill(at.peer.pid, signal.SIGKILL)
        if steps == first + more:
            wait_for(lambda: home.news, time.sleep)

    return on_step


def outcome(folder: Path) -> Row:
    """Return the row of a run: the differences of its two ledgers, and the events of the run."""
    found, entries = check_decisions(folder), read_ledger(folder / NAME)
    counts = Counter(kind for kind, *_ in entries)
    run = read_run_json(folder)
    moves = run.get("metrics", {}).get("slice_moves") or {}
    row: Row = {
        "entries": found.entries,
        "preemptions": counts["victim"],
        "transfers": counts["send"],
        "slice_moves": moves.get("begun", 0),
        "cached_tokens": run.get("metrics", {}).get("cached_tokens", 0),
        "lost": counts["lost"],
        "back": counts["back"],
        "finished": found.finished,
        "difference": found.difference or "",
    }
    kinds = kinds_of(entries)
    kinds["slice_moves"], kinds["prefix_hits"] = row["slice_moves"], row["cached_tokens"]
    return row | {"kinds": " ".join(f"{name}:{kinds[name]}" for name in KINDS if kinds[name])}


def kinds_of(entries: Iterable[Entry]) -> Counter[str]:
    """Count the decisions of a ledger by their kind."""
    found, seen = Counter[str](), set[str]()
    for kind, decided, _ in entries:
        match kind:
            case "batch":
                for request, start, count, _ in next(iter(decided[4:5]), []):
                    found["admissions"] += request not in seen
                    found["chunks"] += request in seen and start > 0 and count > 1
                    seen.add(request)
                found["hand_offs"] += sum(map(len, decided[6:7]))
                found["halves"] += any(decided[7:8])
            case "legs":
                found["reassignments"] += decided[0] in seen
            case "end":
                found["stops"] += decided[1] == "stop"
            case _:
                found[_OF_ENTRIES.get(kind, "")] += 1
    del found[""]
    return found


def never(rows: Iterable[Row]) -> list[str]:
    """Return the kinds of decisions that no run of a matrix has made."""
    made = {each.partition(":")[0] for row in rows for each in str(row["kinds"]).split()}
    return [name for name in KINDS if name not in made]


def summary(path: Path) -> str:
    """Return sentences with the numbers of runs, of equal ledgers, and of all events."""
    rows = read_csv(path)
    sums = Counter[str]()
    for row in rows:
        sums.update({key: value for key, value in row.items() if isinstance(value, int)})
    equal = sum(not row["difference"] for row in rows)
    *counts, last = (f"{sums[name]:,} {name.replace('_', ' ')}" for name in COUNTS)
    return (
        f"In {equal} of {len(rows)} runs, the simulator makes the same decisions as the engine. "
        f"Together, the ledgers have {', '.join(counts)} and {last}. Instances were lost "
        f"{sums['lost']} times and returned {sums['back']} times."
    )


def runs_with(path: Path) -> Counter[str]:
    """Return the number of runs that have each kind of decision."""
    rows = read_csv(path)
    return Counter(each.partition(":")[0] for row in rows for each in str(row["kinds"]).split())


@click.command()
@click.argument("out")
@click.option("--seed", "seeds", multiple=True, type=int, default=(1,), help="Of a whole matrix.")
@click.option("--system", "systems", multiple=True, type=click.Choice([*SYSTEMS]))
@click.option("--workload", "workloads", multiple=True, type=click.Choice([*WORKLOADS]))
def main(out: str, seeds: Sequence[int], systems: Sequence[str], workloads: Sequence[str]) -> None:
    """Run systems on workloads, and write the comparison of their ledgers to OUT, a CSV file.

    By default, all systems and all workloads run. The program fails if ledgers differ, or if a kind
    of decision never occurs.
    """
    # Most of the time goes into compilation, and little into running the programs.
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    jax.config.update("jax_num_cpu_devices", 8)
    # A killed process closes its connections; a busy machine may be silent.
    process.SILENCE_S = 600.0
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary:
        # Profiles measured here must not be used elsewhere.
        profile.FOLDER = Path(temporary, "profiles")
        for seed, system, cluster in product(seeds, systems or SYSTEMS, CLUSTERS):
            names = [n for n in workloads or WORKLOADS if WORKLOADS[n][0] == cluster]
            here: list[Row] = []
            try:
                for row in ledgers(system, names, seed, Path(temporary)):
                    click.echo(f"{system}, {row['workload']}: {row['difference'] or 'equal'}")
                    here.append(row)
            except Exception as error:  # The other rows of the matrix are useful without it.
                why = f"{type(error).__name__}: {one_line(error)}"
                click.echo(f"{system}, {names[len(here)]}: {why}", err=True)
                failed = {"seed": seed, "system": system, "difference": why}
                here += [
                    dict.fromkeys(COLUMNS, 0) | failed | {"workload": name}
                    for name in names[len(here) :]
                ]
            rows += here
            if rows:
                write_csv(Path(out), rows)
    click.echo(summary(Path(out)))
    if lacking := never(rows):
        click.echo(f"of these kinds there was none: {', '.join(lacking)}", err=True)
    sys.exit(bool(lacking) or any(row["difference"] for row in rows))


if __name__ == "__main__":
    main()
