"""The simulator beside a real engine: vLLM's request timings, and ours by tables of its operators.

    python -m scripts.validate.vllm --run RUNFILE --tables FOLDER --requests requests.jsonl

RUNFILE is a run file of the machine, its engine and its model (by default the one of an RTX 4090),
FOLDER has the operators' profile (``meta.yaml``, ``tp1`` and so on), requests.jsonl vLLM's timings,
both as in LLMServingSim's repository. With ``--out`` the simulated run is kept.

Requests arrive when the client sent them. vLLM's engine takes note of one between two steps only,
so ``queued_ts`` is half a step later on average; time to first token counts from the arrival.
"""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import yaml

from jaxinfer.config.run_file import load_run_file
from jaxinfer.errors import JaxinferError
from jaxinfer.report.records import RequestRecord, RunRecord, read_run
from jaxinfer.simulate.run import simulate
from jaxinfer.workload.lengths import BenchRequest
from scripts.tables import CONFIGS

RUN_FILE = CONFIGS / "vllm" / "rtx4090_llama31_8b.yaml"
FIELDS = (
    "input_toks",
    "output_toks",
    "arrival_time",
    "queued_ts",
    "first_token_ts",
    "last_token_ts",
)
Real = Mapping[str, Any]


@click.command()
@click.option("--run", "run_file", default=str(RUN_FILE))
@click.option("--tables", help="By default what the run file has under simulate.")
@click.option("--requests", "path", required=True, type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path))
@click.option("--set", "settings", multiple=True)
def main(
    run_file: str, tables: str | None, path: Path, out: Path | None, settings: tuple[str, ...]
) -> None:
    """Print what the tables had, and mean TTFT, mean TPOT and makespan of both."""
    given = (f"simulate.tables={tables}",) if tables else ()
    try:
        real = read_requests(path)
        with TemporaryDirectory() as scratch:
            run = simulated(run_file, [*given, *settings], real, out or Path(scratch))
    except JaxinferError as error:
        raise click.ClickException(str(error)) from None
    for name, instance in run.run["instances"].items():
        for stage in instance["stages"]:
            print(f"{name}: {stage['num_pages']} pages of KV")
            if "tables" in stage:
                print(yaml.safe_dump(stage["tables"], default_flow_style=None, sort_keys=False))
    for line in compared(real, run.requests):
        print(line)


def read_requests(path: Path) -> list[Real]:
    """vLLM's timings of the requests that have been answered, all by one clock.

    Raises:
        JaxinferError: the file cannot be read, or a line lacks a field.
    """
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise JaxinferError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise JaxinferError(f"{path}: not lines of JSON: {error}") from None
    for number, line in enumerate(lines, 1):
        for field in FIELDS:
            if field not in line:
                raise JaxinferError(f"{path}, line {number}: lacks {field}")
    answered = [line for line in lines if line["output_toks"]]
    if not answered:
        raise JaxinferError(f"{path}: no request was answered")
    # The client's clock is another: whoever was queued quickest ties the two.
    ahead = min(line["queued_ts"] - line["arrival_time"] for line in answered)
    return [line | {"arrival": line["arrival_time"] + ahead} for line in answered]


def simulated(run_file: str, settings: Sequence[str], real: Sequence[Real], out: Path) -> RunRecord:
    """The same requests on the modelled machine."""
    start = min(r["arrival"] for r in real)
    work = [
        BenchRequest(None, r["input_toks"], r["output_toks"], r["arrival"] - start) for r in real
    ]
    simulate(load_run_file(run_file, settings), work, out)
    numbered = (folder for folder in out.iterdir() if folder.name.isdigit())
    return read_run(max(numbered, key=lambda folder: int(folder.name)))


def compared(real: Sequence[Real], ours: Sequence[RequestRecord]) -> list[str]:
    """Lines with both sides' figures."""
    start = min(r["arrival"] for r in real)
    rows = [
        (
            "TTFT mean (s)",
            statistics.fmean(r["first_token_ts"] - r["arrival"] for r in real),
            statistics.fmean(r.token_times[0] - r.arrival for r in ours),
        ),
        (
            "TPOT mean (s)",
            _mean_tpot(real, lambda r: (r["output_toks"], r["first_token_ts"], r["last_token_ts"])),
            _mean_tpot(ours, lambda r: (len(r.token_times), r.token_times[0], r.token_times[-1])),
        ),
        (
            "makespan (s)",
            max(r["last_token_ts"] for r in real) - start,
            max(r.token_times[-1] for r in ours),
        ),
    ]
    lines = [
        f"{name:15} vLLM {theirs:9.4f}  simulated {found:9.4f}  {found / theirs - 1:+.1%}"
        for name, theirs, found in rows
    ]
    return [*lines, f"preemptions: {sum(r.preemptions for r in ours)}"]


def _mean_tpot(of: Sequence[Any], read: Callable[[Any], tuple[int, float, float]]) -> float:
    """Requests of one token have none."""
    spans = [read(request) for request in of]
    found = [(last - first) / (count - 1) for count, first, last in spans if count > 1]
    return statistics.fmean(found) if found else float("nan")


if __name__ == "__main__":
    main()
