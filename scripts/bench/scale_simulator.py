"""Time and memory of simulations, by number of requests and of instances.

    python -m scripts.bench.scale_simulator --out FOLDER

The system is data parallelism over four kinds of GPUs in equal numbers. Lengths are synthetic, and
arrivals are Poisson at a rate that all clusters sustain. Each simulation runs in its own process,
one after the other. The largest has a million requests on 128 GPUs and takes minutes. The program
writes ``scale.csv``, ``memory.csv`` (of the largest simulation, while it runs) and ``scale.png``.
"""

import csv
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from jaxinfer.config.run_file import RunFile, as_run_file

# For each kind of GPU, its requests in one turn, and requests per second.
WEIGHTS = {"H100-SXM": 8, "A100-80G-SXM": 4, "L40S": 2, "A10": 1}
REQUESTS = (1_000, 10_000, 100_000, 1_000_000)
INSTANCES = (4, 8, 16, 32, 64, 128)
# Requests per instance, in the sweep over instances.
REQUESTS_EACH = 1_000


def run_file(requests: int, instances: int) -> RunFile:
    """Return a cluster with this number of GPUs, and its requests."""
    kinds = {f"i{n}": list(WEIGHTS)[n % len(WEIGHTS)] for n in range(instances)}
    shares = {name: {"weight": WEIGHTS[kind], "max_waiting": 10**6} for name, kind in kinds.items()}
    rate = float(sum(WEIGHTS[kind] for kind in kinds.values()))
    engine = {
        "max_num_seqs": 256,
        "max_num_batched_tokens": 2048,
        "page_size": 16,
        "launch_ahead": False,
        "enable_prefix_caching": False,
    }
    return as_run_file(
        {
            "model": "llama-3-8b",
            "engine": engine,
            "groups": {name: {"kind": kind} for name, kind in kinds.items()},
            "instances": {name: {"group": name} for name in kinds},
            "system": {"name": "data_parallel", "shares": shares},
            "workload": {
                "synthetic": {"lengths": "azure_conversation", "count": requests},
                "arrivals": {"kind": "poisson", "rate": rate},
            },
        }
    )


def rss_mib() -> float:
    """Return the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096 / 2**20


def measure(requests: int, instances: int) -> dict[str, Any]:
    """Simulate in this process."""
    from jaxinfer.simulate.run import simulate

    config = run_file(requests, instances)
    work = config.requests()
    memory: list[tuple[int, float]] = []
    ended = 0

    def on_request(*_: object) -> None:
        nonlocal ended
        ended += 1
        if ended % max(requests // 20, 1) == 0:
            memory.append((ended, rss_mib()))

    found = simulate(config, work, on_request=on_request)
    return {
        "requests": requests,
        "instances": instances,
        "steps": found.steps,
        "output_tokens": found.output_tokens,
        "virtual_s": found.wall_s,
        "ttft_p99": found.ttft_p99,
        "tbt_p99": found.tbt_p99,
        "memory": memory,
    }


def in_a_process(requests: int, instances: int) -> dict[str, Any]:
    """Simulate in a new process; ``seconds`` is from its start to its end."""
    command = [sys.executable, __file__, "--one", str(requests), str(instances)]
    started = time.perf_counter()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    found["seconds"] = time.perf_counter() - started
    memory = found["memory"]
    found["mib_at_5_percent"], found["mib_at_the_end"] = memory[0][1], memory[-1][1]
    print(f"{requests:>9,} requests, {instances:>3} GPUs: {found['seconds']:7.1f} s", flush=True)
    return found


def write(folder: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write the figures, and the memory of the largest run."""
    names = [name for name in rows[0] if name != "memory"]
    with (folder / "scale.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, names, extrasaction="ignore")
        table.writeheader()
        table.writerows(rows)
    largest = max(rows, key=lambda row: int(row["requests"]))
    with (folder / "memory.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("requests_ended", "mib"), *largest["memory"]])


def draw(
    path: Path, over_requests: Sequence[dict[str, Any]], over: Sequence[dict[str, Any]]
) -> None:
    """Draw both sweeps, and memory."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, NullFormatter

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    for axis, rows, name in ((left, over_requests, "requests"), (middle, over, "instances")):
        x, y = [row[name] for row in rows], [row["seconds"] for row in rows]
        axis.loglog(x, y, "o-", label="measured")
        axis.loglog(x, [y[-1] * value / x[-1] for value in x], "--", color="0.6", label="linear")
        axis.set(xlabel=name, ylabel="seconds, process start included")
        axis.set(xticks=x, yticks=[1, 10, 100, 1000])
        axis.set_ylim(min(y) / 2, max(y) * 2)
        for ticks in (axis.xaxis, axis.yaxis):
            ticks.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
            ticks.set_minor_formatter(NullFormatter())
        axis.legend(frameon=False)
    left.set_title(f"on {over_requests[0]['instances']} GPUs")
    middle.set_title(f"{REQUESTS_EACH:,} requests per GPU")
    ended, mib = zip(*over_requests[-1]["memory"], strict=True)
    right.plot([count / 1000 for count in ended], mib, "o-")
    right.set(
        ylim=(0, 1.4 * max(mib)), xlabel="thousand requests ended", ylabel="resident memory (MiB)"
    )
    right.set_title(f"while {over_requests[-1]['requests']:,} are served")
    figure.savefig(path, dpi=150)


@click.command()
@click.option("--out", help="New folder.")
@click.option("--one", nargs=2, type=int, help="REQUESTS INSTANCES: only this, as JSON.")
@click.option(
    "--largest",
    default=REQUESTS[-1],
    type=click.IntRange(REQUESTS[0]),
    help="Requests of the largest simulation.",
)
def main(out: str | None, one: tuple[int, int] | None, largest: int) -> None:
    """Measure, write and draw."""
    if one:
        print(json.dumps(measure(*one)))
        return
    if not out:
        raise click.UsageError("give --out FOLDER")
    folder = Path(out)
    folder.mkdir(parents=True)
    over = [in_a_process(count * REQUESTS_EACH, count) for count in INSTANCES]
    sizes = [count for count in REQUESTS if count <= largest]
    over_requests = [in_a_process(count, INSTANCES[-1]) for count in sizes]
    write(folder, [*over, *over_requests])
    draw(folder / "scale.png", over_requests, over)


if __name__ == "__main__":
    main()
