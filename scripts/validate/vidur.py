"""Compare the simulator with Vidur, on Vidur's own profile.

    python -m scripts.validate.vidur --tables FOLDER --requests request_metrics.csv.gz --out DIR

FOLDER comes from ``scripts/validate/vidur_tables.py``, request_metrics.csv.gz from Vidur.
"""

import csv
import gzip
from pathlib import Path

import click
import numpy as np

from jaxinfer.config.run_file import load_run_file
from jaxinfer.report.records import read_run
from jaxinfer.simulate.run import simulate
from jaxinfer.workload.lengths import BenchRequest
from scripts.tables import CONFIGS

RUN_FILE = CONFIGS / "vidur" / "codellama_34b.yaml"


@click.command()
@click.option("--tables", required=True)
@click.option("--requests", "path", required=True, type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path))
def main(tables: str, path: Path, out: Path) -> None:
    """Print mean and p99 of TTFT, and of decode time per token, of both."""
    with gzip.open(path, "rt", newline="", encoding="utf-8") as file:
        theirs = list(csv.DictReader(file))
    gaps = [float(row["request_inter_arrival_delay"] or 0) for row in theirs]
    arrivals = np.cumsum(gaps)
    work = [
        BenchRequest(
            None,
            int(float(row["request_num_prefill_tokens"])),
            int(float(row["request_num_decode_tokens"])),
            float(arrival),
        )
        for row, arrival in zip(theirs, arrivals, strict=True)
    ]
    simulate(load_run_file(RUN_FILE, [f"simulate.tables={tables}"]), work, out)
    newest = max(out.iterdir(), key=lambda folder: int(folder.name))
    ours = sorted(read_run(newest).requests, key=lambda request: int(request.id))
    figures = {
        "TTFT": (
            [float(row["prefill_e2e_time"]) for row in theirs],
            [r.token_times[0] - r.arrival for r in ours],
        ),
        # Vidur divides by the number of all output tokens, including the first.
        "decode per token": (
            [float(row["decode_time_execution_plus_preemption_normalized"]) for row in theirs],
            [(r.token_times[-1] - r.token_times[0]) / len(r.token_times) for r in ours],
        ),
    }
    for name, (vidur, found) in figures.items():
        for what, of in (("mean", np.mean), ("p99", lambda x: np.percentile(x, 99))):
            a, b = float(of(vidur)), float(of(found))
            print(f"{name:17} {what:4} Vidur {a:.4f} s  ours {b:.4f} s  {b / a - 1:+.1%}")


if __name__ == "__main__":
    main()
