"""Simulate two kinds of batches in each order, on three clusters, beside the bound.

    python -m scripts.bench.blended_batch

Batch ``tasks`` has long documents with short answers and short requests with long answers, each
after one of a few instructions. In batch ``documents`` there are 30 questions about each document,
which all have short answers or all have long ones. Requests are in random order. The bound is for
any system.
"""

import random
from collections.abc import Callable, Sequence
from typing import get_args

import click

from jaxinfer.config.run_file import RunFile, load_run_file
from jaxinfer.files.shipped import data_path
from jaxinfer.lab.plan.bound import bound_of
from jaxinfer.simulate.run import prepare, serve
from jaxinfer.workload.bench_request import BenchRequest
from jaxinfer.workload.order import Order, modelled_in_order
from scripts.tables import Row, show_table

ENGINE = (
    "engine.enable_prefix_caching=true",
    "engine.max_num_batched_tokens=512",
    "engine.policies.admit=once_per_prefix",
)
ONE = "model=llama-3-8b", "engine.max_num_seqs=256", "engine.max_model_len=8192"
CLUSTERS = {
    "A10": ("prefixes/questions", (*ONE, "engine.num_pages=null")),
    "A100": ("prefixes/questions", (*ONE, "engine.num_pages=null", "groups.g.kind=A100-80G-SXM")),
    "A100 + A10": ("takeover/pair", ("system.by_cache=true",)),
}


def _request(prefix: int, shared: int, own: int, output: int) -> BenchRequest:
    return BenchRequest(None, shared + own, output, 0.0, prefix=(prefix, shared))


def tasks(scale: float) -> list[BenchRequest]:
    """Return 3,000 documents to classify and 1,000 texts to write, by four instructions each."""
    rng = random.Random(0)
    work = [
        _request(rng.randrange(4), 300, rng.randrange(800, 2200), rng.randrange(4, 16))
        for _ in range(round(3000 * scale))
    ]
    work += [
        _request(4 + rng.randrange(4), 500, rng.randrange(50, 150), rng.randrange(300, 900))
        for _ in range(round(1000 * scale))
    ]
    rng.shuffle(work)
    return work


def documents(scale: float) -> list[BenchRequest]:
    """Return 30 questions about each of 100 documents of 2,000 tokens."""
    rng, work = random.Random(0), []
    for number in range(round(100 * scale)):
        outputs = (200, 500) if rng.random() < 0.4 else (4, 16)
        work += [
            _request(number, 2000, rng.randrange(20, 200), rng.randrange(*outputs))
            for _ in range(30)
        ]
    rng.shuffle(work)
    return work


BATCHES: dict[str, Callable[[float], list[BenchRequest]]] = {
    "tasks": tasks,
    "documents": documents,
}


def cluster(name: str) -> RunFile:
    """Return the run file of a cluster."""
    path, settings = CLUSTERS[name]
    return load_run_file(data_path(f"configs/{path}.yaml"), [*ENGINE, *settings])


def measure(batch: Sequence[BenchRequest], config: RunFile, order: Order) -> tuple[float, float]:
    """Return the seconds, and the rate divided by the bound's."""
    made = prepare(config)
    seconds = serve(made, modelled_in_order(batch, order)).wall_s
    return seconds, len(batch) / seconds / bound_of(made, batch).rate


@click.command()
@click.option("--scale", type=click.FloatRange(0.01), default=1.0, help="Share of the requests.")
def main(scale: float) -> None:
    """Print seconds and shares of the bound."""
    rows: list[Row] = []
    for batch, draw in BATCHES.items():
        work = draw(scale)
        for name in CLUSTERS:
            row: Row = {"batch": batch, "cluster": name}
            for order in get_args(Order):
                seconds, share = measure(work, cluster(name), order)
                row |= {order: f"{seconds:.0f} s", f"{order}, of the bound": f"{share:.3f}"}
            rows.append(row)
    show_table(rows)


if __name__ == "__main__":
    main()
