"""Costs of a process of one's own: steps launched, KV moved, beside threads of one process.

    python -m scripts.bench.processes [--model MODEL] [--rounds N]

Launch: from the call in the loop's process to the worker's own launch, of decode steps that run one
at a time, by rows. KV: 10^9 bytes per second of slabs that are probed, by each transport. The two
processes are on this host and share its clock.
"""

import statistics
import time
from queue import SimpleQueue
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from jaxinfer import LLM
from jaxinfer.config.run_file import as_run_file
from jaxinfer.request import Sampling, SamplingParams
from jaxinfer.runtime.kv.outcome import Failed
from jaxinfer.serving.batch import Batch, Row
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.world import StepDone

ROWS = (1, 16, 64)
PROMPT = 200


def run_file(model: str, process: str | None, transport: str = "host") -> dict[str, Any]:
    """Two instances, both in this process or each in one of its own."""
    groups = {name: {"process": process} if process else {} for name in ("a", "b")}
    return {
        "model": model,
        "engine": {
            "max_num_seqs": max(ROWS),
            "max_num_batched_tokens": 64,
            "token_buckets": [64],
            "max_model_len": 512,
            "num_pages": 700,
            "page_size": 32,
        },
        "groups": groups,
        "instances": {name: {"group": name} for name in groups},
        "system": {"name": "disaggregated", "prefill": "a", "decode": "b"},
        "transport": transport,
    }


def decodes(llm: LLM, count: int) -> Batch:
    """A step of so many rows, each a token behind its prompt."""
    kv = llm.engine.new_kv()
    rows = []
    for number in range(count):
        payload = Sampling(SamplingParams(temperature=0), seed=0)
        tokens = [number % 100] * PROMPT
        request = RequestState(f"r{number}", PROMPT, 100, 0.0, tokens, payload)
        request.output_token_ids = [1]
        hold = kv.reserve(PROMPT + 100)
        assert hold
        rows.append(Row(request, PROMPT, 1, True, False, 0, hold))
    return Batch("a", rows, 0, count, 0)


def launch_us(llm: LLM, count: int, rounds: int) -> list[float]:
    """Microseconds from the loop's call to the worker's start, of each step."""
    batch, found = decodes(llm, count), []
    posted: SimpleQueue[Any] = SimpleQueue()
    for _ in range(rounds):
        called = time.perf_counter()
        llm.engine.worker.launch(batch, 0.0, posted.put)
        done: StepDone | Failed = posted.get()
        assert isinstance(done, StepDone), done
        found.append(1e6 * (done.start - called))
        for row, token in zip(batch.rows, done.tokens, strict=True):
            row.request.output_token_ids.append(token)
            row.start += 1
    return found[3:]  # The first ones tell of all that is new.


@click.command()
@click.option("--model", default="smollm2-135m-instruct")
@click.option("--rounds", default=80, help="Steps of each size.")
def main(model: str, rounds: int) -> None:
    """Print two tables."""
    launches = Table("process", *(f"{rows} rows: median, p90 (us)" for rows in ROWS))
    rates = Table("from a to b", "GB/s")
    cases = (("this one", None, "host"), ("own", "own", "host"), ("own", "own", "transfer_server"))
    for name, process, transport in cases:
        config = as_run_file(run_file(model, process, transport))
        llm = LLM.from_config(config)
        if transport == "host":
            cells = []
            for rows in ROWS:
                times = launch_us(llm, rows, rounds)
                cells.append(
                    f"{statistics.median(times):.0f}, {statistics.quantiles(times, n=10)[8]:.0f}"
                )
            launches.add_row(name, *cells)
        way = f"processes, {transport}" if process else "one process"
        rates.add_row(way, f"{llm.cluster.measured_gb_s['a -> b']:.2f}")
        del llm
    Console().print(launches, rates)


if __name__ == "__main__":
    main()
