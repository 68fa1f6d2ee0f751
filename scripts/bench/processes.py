"""Costs of separate processes, compared with threads of one process: launches and KV transfers.

    python -m scripts.bench.processes [--model MODEL] [--rounds N] [--attention]

The first table has the times from the call in the loop's process to the worker's own launch, by
rows, for decode steps that run one at a time. The second has the rate at which probe slabs of KV
are sent, in 10^9 bytes per second, by each transport. With ``--attention``, a table has the times
of the layers of decode steps whose KV heads are all on an attention group. All processes are on
this host and share its clock.
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
    """Return a run file of two instances, both in this process or each in its own."""
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


def spread_file(model: str, process: str | None) -> dict[str, Any]:
    """Return a run file of one stage and its attention group, here or each in a process."""
    found = run_file(model, process)
    stages = [{"group": "a", "attention": ["b"]}]
    options = {"stages": stages, "enable_prefix_caching": False}
    return found | {"instances": {"x": options}, "system": "single"}


def decodes(llm: LLM, count: int) -> Batch:
    """Return a step of ``count`` rows of one token; their heads are in the last shard."""
    kv = llm.engine.new_kv()
    slices = [piece for shard in kv.shards for piece in shard.slices]
    placement: list[list[int]] = [[] for _ in kv.shards[1:]] + [slices]
    rows = []
    for number in range(count):
        payload = Sampling(SamplingParams(temperature=0), seed=0)
        tokens = [number % 100] * PROMPT
        request = RequestState(f"r{number}", PROMPT, 100, 0.0, tokens, payload)
        request.output_token_ids = [1]
        hold = kv.reserve(PROMPT + 100, placement=placement)
        assert hold
        rows.append(Row(request, PROMPT, 1, True, False, 0, hold))
    return Batch(llm.engine.name, rows, 0, count, 0)


def step_us(llm: LLM, count: int, rounds: int) -> list[tuple[float, float]]:
    """Return microseconds from the loop's call to the worker's start and end, for each step."""
    batch, found = decodes(llm, count), []
    posted: SimpleQueue[Any] = SimpleQueue()
    for _ in range(rounds):
        called = time.perf_counter()
        llm.engine.worker.launch(batch, 0.0, posted.put)
        done: StepDone | Failed = posted.get()
        assert isinstance(done, StepDone), done
        found.append((1e6 * (done.start - called), 1e6 * (done.end - done.start)))
        for row, token in zip(batch.rows, done.tokens, strict=True):
            row.request.output_token_ids.append(token)
            row.start += 1
    return found[3:]  # The first steps send everything that is new.


@click.command()
@click.option("--model", default="smollm2-135m-instruct")
@click.option("--rounds", default=80, help="Steps of each size.")
@click.option("--attention", is_flag=True, help="Layers whose attention is elsewhere, alone.")
def main(model: str, rounds: int, attention: bool) -> None:
    """Print two tables, or one."""
    tables = [layers(model, rounds)] if attention else launches(model, rounds)
    Console().print(*tables)


def launches(model: str, rounds: int) -> tuple[Table, Table]:
    """Return the times of launches, and the rate of KV."""
    launches = Table("process", *(f"{rows} rows: median, p90 (us)" for rows in ROWS))
    rates = Table("from a to b", "GB/s")
    cases = (("this one", None, "host"), ("own", "own", "host"), ("own", "own", "transfer_server"))
    for name, process, transport in cases:
        llm = LLM.from_config(as_run_file(run_file(model, process, transport)))
        if transport == "host":
            times = ([launch for launch, _ in step_us(llm, rows, rounds)] for rows in ROWS)
            launches.add_row(name, *map(in_words, times))
        way = f"processes, {transport}" if process else "one process"
        rates.add_row(way, f"{llm.cluster.measured_gb_s['a -> b']:.2f}")
        del llm
    return launches, rates


def layers(model: str, rounds: int) -> Table:
    """Return the seconds of a decode step's layer whose attention is all on another device."""
    found = Table("process of the group", *(f"{rows} rows: least, median (us)" for rows in ROWS))
    for name, process in (("this one", None), ("own", "own")):
        llm = LLM.from_config(as_run_file(spread_file(model, process)))
        count = sum(plan.layers.stop - plan.layers.start for plan in llm.engine.plans)
        times = ([step / count for _, step in step_us(llm, rows, rounds)] for rows in ROWS)
        found.add_row(name, *(f"{min(each):.0f}, {statistics.median(each):.0f}" for each in times))
        del llm
    return found


def in_words(times: list[float]) -> str:
    """Return the median and the 90th percentile as text."""
    return f"{statistics.median(times):.0f}, {statistics.quantiles(times, n=10)[8]:.0f}"


if __name__ == "__main__":
    main()
