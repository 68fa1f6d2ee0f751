"""Aladdin's claims that need no search."""

import time
from collections.abc import Collection, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from jaxinfer.config.run_file import RunFile, as_run_file
from jaxinfer.papers.aladdin.sizing import MeanRequest, most_tokens
from jaxinfer.papers.aladdin.system import Aladdin
from jaxinfer.report.records import read_lines
from jaxinfer.serving.admission import peak_entries
from jaxinfer.serving.batch import Work as StepWork
from jaxinfer.serving.system import Assignment
from jaxinfer.serving.views import ClusterView, RequestView
from jaxinfer.simulate.cluster import fit_instance
from jaxinfer.simulate.run import prepare, simulate
from jaxinfer.simulate.targets import RequestTargets
from jaxinfer.workload.arrivals import Arrivals, with_arrivals
from jaxinfer.workload.lengths import BenchRequest
from scripts.reproduce.aladdin.runs import ATGT_S, TTFT_S, Way, draw
from scripts.reproduce.claims import Target, agrees, by_share, holds
from scripts.reproduce.recorded import recorded
from scripts.reproduce.reproduction import Inputs, Part, Work
from scripts.tables import Row

A100, PCIE, V100 = "A100-80G-SXM", "A100-80G-PCIe", "V100-SXM2"
# Model, GPU, GPUs of a worker (Table 3), and Table 2: prefill and decode SLO, in ms.
TESTBED = [
    ("llama-2-70b", PCIE, 2, 1600, 75),
    ("llama-2-13b", PCIE, 1, 600, 30),
    ("llama-2-7b", PCIE, 1, 400, 15),
    ("llama-2-13b", V100, 2, 800, 50),
    ("llama-2-7b", V100, 1, 800, 30),
]
ENGINE = {
    "page_size": 16,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 4096,
    "enable_prefix_caching": False,
    "launch_ahead": False,
    "max_model_len": 4608,
    "policies": {"batching": "prefill_first"},
}
# Vidur's CPU overheads of these models.
OVERHEADS = {"step_s": 0.0009, "sequence_s": 0.00004}
# A request of ShareGPT's mean lengths.
MEAN = (246, 326)


def worker(model: str, gpu: str, gpus: int, **costs: Any) -> RunFile:
    """Return the run file of one worker."""
    return as_run_file(
        {
            "model": model,
            "engine": ENGINE,
            "system": "single",
            "simulate": costs,
            "groups": {"g": {"kind": gpu, "devices": gpus}},
            "instances": {"w": {"group": "g"}},
        }
    )


def alone(config: RunFile, prompt: int, output: int) -> Sequence[float]:
    """Return the times of the tokens of a request that is alone."""
    found: list[Sequence[float]] = []
    work = [BenchRequest(None, prompt, output, 0.0)]
    simulate(config, work, on_request=lambda _, times: found.append(list(times)))
    return found[0]


def figure_3(inputs: Inputs) -> Part:
    """Peaks of KV entries of two workers, by the shortest queue and by the best assignment."""
    requests = [(4, 1), (1, 4), (4, 1), (1, 4)]
    jsq = max(peak_entries(requests[::2]), peak_entries(requests[1::2]))
    peaks = []
    for sides in product((0, 1), repeat=4):
        of = [[r for r, s in zip(requests, sides, strict=True) if s == n] for n in (0, 1)]
        peaks.append(max(map(peak_entries, of)))
    rows = [{"placement": "shortest queue", "peak": jsq}, {"placement": "best", "peak": min(peaks)}]
    exact = (jsq, min(peaks)) == (10, 7)
    return Part(rows, [
        holds("figure 3: peaks of the shortest queue and the best", "10, 7", f"{jsq}, {min(peaks)}",
              exact, "equal")
    ])  # fmt: skip


def table_2(inputs: Inputs) -> Part:
    """A prompt of 4,096 tokens, and 1.3 times the gap of a lone request, by the roofline."""
    rows, targets = [], []
    for model, gpu, gpus, prefill, decode in TESTBED:
        config = worker(model, gpu, gpus)
        first = 1000 * alone(config, 4096, 1)[0]
        times = alone(config, *MEAN)
        gap = 1300 * (times[-1] - times[0]) / (len(times) - 1)
        name = f"{model}, {gpus} x {gpu}"
        rows.append(
            {
                "worker": name,
                "prefill (ms)": round(first),
                "paper": prefill,
                "1.3 x decode (ms)": round(gap, 1),
                "paper ": decode,
            }
        )
        targets.append(by_share(f"Table 2, {name}: prefill (ms)", prefill, first, 0.2))
        targets.append(by_share(f"Table 2, {name}: decode (ms)", decode, gap, 0.2))
    return Part(rows, targets)


def models(tables: Path) -> tuple[list[Row], list[Target]]:
    """Return the largest errors of eqs. 2 and 3, relative to the costs that they are fitted to."""
    rows, targets = [], []
    cases = [
        (f"{model}, roofline", worker(model, A100, gpus))
        for model, gpu, gpus, *_ in TESTBED
        if gpu == PCIE
    ]
    cases.append(
        ("llama-2-7b, tables", worker("llama-2-7b", A100, 1, tables=str(tables), **OVERHEADS))
    )
    for name, config in cases:
        cluster = prepare(config)
        cost, fit = cluster.instances["w"].cost, fit_instance(cluster.instances["w"], relative=True)
        assert fit.decode
        of_prefill = [
            abs(fit.prefill.seconds(n) / sum(cost.stages(StepWork(n, 0, 1, 1, 0, [(0, n)]))) - 1)
            for n in range(512, 4097, 256)
        ]
        of_decode = [
            abs(
                fit.decode.seconds(n * k, n) / sum(cost.stages(StepWork(n, n, n, n, n * k, [], n)))
                - 1
            )
            for n in (2, 4, 8, 16, 32)
            for k in (128, 256, 512, 1024)
        ]
        most = [round(100 * max(each), 1) for each in (of_prefill, of_decode)]
        rows.append(
            {
                "costs": name,
                "eq. 2, 512 to 4096 tokens (%)": most[0],
                "eq. 3, 2 to 32 requests (%)": most[1],
            }
        )
        claim = f"largest error, {name}"
        for eq, said, limit in zip(("2", "3"), most, (4, 5), strict=True):
            bound = f"below {limit} %"
            targets.append(holds(f"{claim}: eq. {eq}", bound, f"{said} %", said < limit, bound))
    return rows, targets


def equation_6(tables: Path, work: Work, atgt_s: float) -> tuple[list[Row], list[Target]]:
    """Return tokens per second and GPU of 7B workers, by tables and by the roofline."""
    rows, best = [], {}
    mean = MeanRequest.of(work)
    for name, costs in (("tables", {"tables": str(tables), **OVERHEADS}), ("roofline", {})):
        found = {}
        for gpus in (1, 2, 4):
            cluster = prepare(worker("llama-2-7b", A100, gpus, **costs))
            fit, modelled = (
                fit_instance(cluster.instances["w"], relative=True),
                cluster.instances["w"],
            )
            room = (min(modelled.num_pages) - 1) * modelled.config.page_size
            assert fit.decode
            found[gpus] = most_tokens(fit.decode, gpus, room, mean, atgt_s)
            rows.append(
                {
                    "costs": name,
                    "GPUs": gpus,
                    "c3 (ms)": round(1e3 * fit.decode.constant, 2),
                    "by memory": round(found[gpus].by_memory),
                    "by target": round(found[gpus].by_target),
                }
            )
        best[name] = max(found, key=lambda gpus: found[gpus].least)
    return rows, [
        holds(f"Table 3, 7B on A100s: GPUs by eq. 6, {name}", "1", str(gpus), gpus == 1, "equal")
        for name, gpus in best.items()
    ]


def opened(tables: Path, work: Work, ways: Sequence[Way], rate: float) -> list[Row]:
    """Return how many of 40 workers each way uses if no request has to wait, and its attainment."""
    rows = []
    for way in ways:
        watch = RequestTargets({"ttft": TTFT_S, "tpot": ATGT_S}).watch(work)
        arrivals = with_arrivals(work, Arrivals(kind="poisson", rate=rate, seed=0))
        metrics = simulate(way.config(tables, 40), arrivals, on_request=watch.add)
        used = sum(use.first_step is not None for use in metrics.instances.values())
        share = 100 * (watch.verdict().attainment or 0)
        rows.append(
            {
                "system": way.name,
                "theta": way.system["theta"],
                "used": used,
                "attainment (%)": round(share, 1),
            }
        )
    return rows


class TimedAladdin(Aladdin):
    """Aladdin, with a measurement of the CPU time of its decisions."""

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.seconds: list[float] = []
        self.placed_count = 0

    def route(self, waiting: Collection[RequestView], cluster: ClusterView) -> Sequence[Assignment]:
        """Route as Aladdin does, and time it."""
        started = time.thread_time()
        found = super().route(waiting, cluster)
        self.seconds.append(time.thread_time() - started)
        self.placed_count += len(found)
        return found

    def on_finish(self, request: RequestView, cluster: ClusterView) -> None:
        """Finish as Aladdin does, and time it."""
        started = time.thread_time()
        super().on_finish(request, cluster)
        self.seconds.append(time.thread_time() - started)

    def report(self) -> Mapping[str, object]:
        """Return the total seconds, and those of the longest call."""
        return {
            "seconds": sum(self.seconds),
            "longest": max(self.seconds),
            "placed": self.placed_count,
        }


def overhead(tables: Path, trace: Work, way: Way) -> tuple[list[Row], list[Target]]:
    """Return this host's time to dispatch a request, at rates that fill the given workers."""
    timed = Way(way.name, dict(way.system) | {"name": f"{__name__}:Timed"}, way.oracle)
    loads = ((32, 80.0), (64, 160.0), (128, 340.0))
    rows = [_timed(tables, trace, timed, *each) for each in loads]
    each = rows[-1]["ms for each request"]
    return rows, [
        agrees(
            "time for a request at 128 workers (paper: < 50 ms at 25 req/s)",
            f"{each} ms",
            each < 50,
            "below 50 ms",
        )
    ]


def _timed(tables: Path, trace: Work, way: Way, workers: int, rate: float) -> Row:
    work = with_arrivals(draw(trace, 0, 4000), Arrivals(kind="poisson", rate=rate, seed=0))
    metrics, run = recorded(way.config(tables, workers), work, read_lines)
    said = run.run["system_report"]
    used = sum(use.first_step is not None for use in metrics.instances.values())
    return {
        "workers": workers,
        "requests/s": rate,
        "used": used,
        "ms for each request": round(1e3 * said["seconds"] / said["placed"], 3),
        "longest call (ms)": round(1e3 * said["longest"], 1),
    }
