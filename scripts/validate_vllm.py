"""The simulator beside a real engine: vLLM's request timings on an RTX 4090, and ours.

    python scripts/validate_vllm.py --tables FOLDER --requests requests.jsonl --out DIR

FOLDER has the operators' profile (``meta.yaml`` and ``tp1``), requests.jsonl vLLM's timings, both
as in LLMServingSim's repository.
"""

import json
import statistics
from pathlib import Path

import click

from jaxinfer.config import load_run_file
from jaxinfer.report.records import read_run
from jaxinfer.simulate.run import simulate
from jaxinfer.workload.lengths import BenchRequest

RUN_FILE = Path(__file__).parents[1] / "configs" / "vllm" / "rtx4090_llama31_8b.yaml"


@click.command()
@click.option("--tables", required=True)
@click.option("--requests", "path", required=True, type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path))
@click.option("--set", "settings", multiple=True)
def main(tables: str, path: Path, out: Path, settings: tuple[str, ...]) -> None:
    """Print mean TTFT, mean TPOT and makespan of both."""
    real = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    # Arrival by the wall clock, the rest by a monotonic one: the first to be queued ties them.
    start = min(r["queued_ts"] for r in real)
    work = [
        BenchRequest(None, r["input_toks"], r["output_toks"], r["queued_ts"] - start) for r in real
    ]
    config = load_run_file(RUN_FILE, [f"simulate.tables={tables}", *settings])
    simulate(config, work, out)
    newest = max(out.iterdir(), key=lambda folder: int(folder.name))
    ours = sorted(read_run(newest).requests, key=lambda request: int(request.id))
    figures = {
        "TTFT mean (s)": (
            statistics.fmean(r["first_token_ts"] - r["queued_ts"] for r in real),
            statistics.fmean(r.token_times[0] - r.arrival for r in ours),
        ),
        "TPOT mean (s)": (
            statistics.fmean(
                (r["last_token_ts"] - r["first_token_ts"]) / (r["output_toks"] - 1)
                for r in real
                if r["output_toks"] > 1
            ),
            statistics.fmean(
                (r.token_times[-1] - r.token_times[0]) / (len(r.token_times) - 1)
                for r in ours
                if len(r.token_times) > 1
            ),
        ),
        "makespan (s)": (
            max(r["last_token_ts"] for r in real) - start,
            max(r.token_times[-1] for r in ours),
        ),
    }
    for name, (theirs, found) in figures.items():
        print(f"{name:15} vLLM {theirs:9.4f}  simulated {found:9.4f}  {found / theirs - 1:+.1%}")
    print(f"preemptions: {sum(r.preemptions for r in ours)}")


if __name__ == "__main__":
    main()
