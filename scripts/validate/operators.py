"""Compare the simulator with this engine, by tables of `profile --operators`.

    python -m scripts.validate.operators --out DIR

The program profiles configs/cpu/operators.yaml with one and with two devices. With
``--tables FOLDER``, it takes what an earlier profile has written. It then serves the same requests
for real, all present at the start, with mixed batches and with prompts first, in several rounds in
turns. It simulates each of these runs, too. It prints both, and writes ``operators.csv``. It also
writes ``operator_steps.csv``, which compares the real steps with the tables, by kind. Nothing else
should run on the machine.
"""

import random
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import click

from jaxinfer.config.run_file import load_run_file
from jaxinfer.report.metrics import RunMetrics
from jaxinfer.serving.batch import Work
from jaxinfer.serving.world import StepDone
from jaxinfer.simulate.run import prepare, simulate
from jaxinfer.steps.shapes import StepLimits
from jaxinfer.workload.lengths import BenchRequest
from scripts.tables import CONFIGS, show_table, write_csv

RUN_FILE = str(CONFIGS / "cpu" / "operators.yaml")
DEGREES, POLICIES = (1, 2), ("mixed", "prefill_first")
ROUNDS, REQUESTS = 5, 40
FIGURES = {
    "makespan": "wall_s",
    "TTFT, mean": "ttft_mean",
    "TTFT, p90": "ttft_p90",
    "TBT, mean": "tbt_mean",
    "TBT, p99": "tbt_p99",
}
Row = dict[str, Any]


def workload() -> list[BenchRequest]:
    """Return prompts and answers of many lengths, all present at the start."""
    rng = random.Random(0)
    return [
        BenchRequest(None, rng.randint(20, 250), rng.randint(4, 60), 0.0) for _ in range(REQUESTS)
    ]


def kind_of(limits: StepLimits, work: Work) -> str:
    """Name a step's kind: its padded size, and whether some of it decodes."""
    shape = limits.smallest(work.singles, work.tokens, work.sampled)
    if not shape.chunks:
        return f"{shape.rows} decodes"
    return f"{shape.tokens} tokens, {'with' if work.singles else 'without'} decodes"


class Steps:
    """Seconds of the steps of one real run, measured and by the tables, by kind."""

    def __init__(self, tables: str) -> None:
        cluster = prepare(load_run_file(tables))
        (self._modelled,) = cluster.instances.values()
        self._limits = limits_of(tables)
        self.seconds: dict[str, list[tuple[float, float]]] = defaultdict(list)

    def add(self, done: StepDone) -> None:
        """Add an ended step."""
        work = done.batch.work
        both = done.end - done.start, sum(self._modelled.cost.stages(work))
        self.seconds[kind_of(self._limits, work)].append(both)

    @property
    def busy_s(self) -> float:
        """Seconds of all steps."""
        return sum(real for found in self.seconds.values() for real, _ in found)


def limits_of(run_file: str) -> StepLimits:
    """Return the padded sizes of the steps of the only instance."""
    (engine,) = load_run_file(run_file).cluster().instances.values()
    assert engine.max_model_len
    return StepLimits(
        engine.max_num_seqs,
        engine.max_num_batched_tokens,
        -(-engine.max_model_len // engine.page_size),
        engine.page_size,
        engine.token_buckets,
    )


def serve(tables: Path, work: Sequence[BenchRequest]) -> dict[tuple[int, str], Any]:
    """Serve for real; return, for each way, a list of metrics and steps by round."""
    from jaxinfer.lab.measure import measure
    from jaxinfer.llm import LLM
    from jaxinfer.runtime.stage.devices import count_cpu_devices

    ways = [(degree, policy) for degree in DEGREES for policy in POLICIES]
    configs = {
        f"{degree}, {policy}": load_run_file(
            RUN_FILE, [f"groups.strong.devices={degree}", f"engine.policies.batching={policy}"]
        )
        for degree, policy in ways
    }
    count_cpu_devices(config.cluster() for config in configs.values())
    loaded = LLM.load_all(configs)
    found: dict[tuple[int, str], Any] = {way: [] for way in ways}
    for _ in range(ROUNDS):
        for way, llm in zip(ways, loaded.values(), strict=True):
            steps = Steps(str(tables / f"tp{way[0]}.yaml"))
            found[way].append((measure(llm, work, RUN_FILE, None, steps.add), steps))
    return found


def compared(way: tuple[int, str], real: Sequence[RunMetrics], ours: RunMetrics) -> list[Row]:
    """Compare each figure: the median of the real rounds, and the error of ours."""
    rows = []
    for name, field in FIGURES.items():
        rounds = [getattr(metrics, field) for metrics in real]
        middle, simulated = median(rounds), getattr(ours, field)
        rows.append(
            {
                "devices": way[0],
                "batches": way[1],
                "figure": name,
                "real (s)": round(middle, 4),
                "quickest (s)": round(min(rounds), 4),
                "slowest (s)": round(max(rounds), 4),
                "simulated (s)": round(simulated, 4),
                "off (%)": round(off(simulated, middle), 1),
            }
        )
    return rows


def by_kind(way: tuple[int, str], steps: Steps, wall_s: float) -> list[Row]:
    """Return rows of one real run: each kind of steps, and the time between them."""
    rows: list[Row] = []
    for kind, both in sorted(steps.seconds.items()):
        real, tables = (sum(each) for each in zip(*both, strict=True))
        rows.append(
            {
                "devices": way[0],
                "batches": way[1],
                "steps of": kind,
                "steps": len(both),
                "real (s)": round(real, 3),
                "by tables (s)": round(tables, 3),
                "off (%)": round(off(tables, real), 1),
                "of the makespan (%)": round(100 * (tables - real) / wall_s, 1),
            }
        )
    between = wall_s - steps.busy_s
    rows.append(
        {
            "devices": way[0],
            "batches": way[1],
            "steps of": "none, between steps",
            "steps": 0,
            "real (s)": round(between, 3),
            "by tables (s)": 0.0,
            "off (%)": "",
            "of the makespan (%)": round(-100 * between / wall_s, 1),
        }
    )
    return rows


def off(ours: float, theirs: float) -> float:
    """Return by how many percent ours is above theirs."""
    return 100 * (ours / theirs - 1)


@click.command()
@click.option("--out", required=True, type=click.Path(path_type=Path))
@click.option("--tables", type=click.Path(path_type=Path, exists=True))
def main(out: Path, tables: Path | None) -> None:
    """Print and write both tables."""
    out.mkdir(parents=True, exist_ok=True)
    if tables is None:
        tables = out / "tables"
        profile = ["profile", RUN_FILE, "--operators", "--tensor-parallel", "1,2"]
        command = [sys.executable, "-m", "jaxinfer", *profile, "--out", str(tables)]
        subprocess.run(command, check=True)
    work = workload()
    rows: list[Row] = []
    kinds: list[Row] = []
    for way, rounds in serve(tables, work).items():
        policy = f"engine.policies.batching={way[1]}"
        ours = simulate(load_run_file(str(tables / f"tp{way[0]}.yaml"), [policy]), work)
        rows += compared(way, [metrics for metrics, _ in rounds], ours)
        metrics, steps = sorted(rounds, key=lambda each: each[0].wall_s)[len(rounds) // 2]
        kinds += by_kind(way, steps, metrics.wall_s)
    for name, table in (("operators", rows), ("operator_steps", kinds)):
        show_table(table)
        write_csv(out / f"{name}.csv", table)
        print()


if __name__ == "__main__":
    main()
