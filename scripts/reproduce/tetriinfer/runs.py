"""TetriInfer's runs: workloads, clusters and their figures."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from jaxinfer.config.run_file import RunFile, load_run_file
from jaxinfer.report.metrics import RunMetrics
from jaxinfer.report.records import read_lines
from jaxinfer.simulate.run import simulate
from jaxinfer.workload.lengths import BenchRequest
from jaxinfer.workload.synthetic import is_of_class
from scripts.reproduce.recorded import recorded
from scripts.reproduce.reproduction import Work
from scripts.tables import CONFIGS

FOLDER = CONFIGS / "tetriinfer"
TRACE = "sharegpt.csv"
CLASSES = ("LPLD", "LPHD", "HPLD", "HPHD")
WORKLOADS = (*CLASSES, "Mixed")
REQUESTS, SEEDS = 128, range(3)


def of_class(trace: Work, name: str) -> list[BenchRequest]:
    """Return pairs of at most 2,048 tokens of one class, or of all."""
    fitting = [item for item in trace if item.prompt_len + item.max_tokens <= 2048]
    return [item for item in fitting if name == "Mixed" or is_of_class(item, name)]  # type: ignore[arg-type]


def draw(trace: Work, name: str, count: int, seed: int) -> list[BenchRequest]:
    """Draw different pairs, which all arrive at the start."""
    return random.Random(seed).sample(of_class(trace, name), count)


def phases(trace: Work, parts: Sequence[tuple[str, float, float]], seed: int) -> list[BenchRequest]:
    """Return Poisson arrivals in parts: each has a class, requests per second, and seconds."""
    rng, start, work = random.Random(seed), 0.0, []
    for name, rate, seconds in parts:
        pool, now = of_class(trace, name), start
        while (now := now + rng.expovariate(rate)) < start + seconds:
            item = rng.choice(pool)
            work.append(BenchRequest(None, item.prompt_len, item.max_tokens, now))
        start += seconds
    return work


@dataclass(frozen=True)
class RunFigures:
    """Figures of one run; all but the last are in seconds.

    Attributes:
        ttft: mean time to the first token.
        jct: mean job completion time.
        makespan: time until the last request's end.
        resource: sum of the times from each instance's first step to its last.
        busy: the part of ``resource`` in steps.
        preemptions: number of preemptions.
    """

    ttft: float
    jct: float
    makespan: float
    resource: float
    busy: float
    preemptions: int

    @classmethod
    def of(cls, metrics: RunMetrics) -> "RunFigures":
        """Read the figures of a run's metrics."""
        uses = metrics.instances.values()
        spans = [(use.last_step or 0.0) - (use.first_step or 0.0) for use in uses]
        assert metrics.ttft_mean is not None
        assert metrics.e2e_mean is not None
        return cls(
            metrics.ttft_mean,
            metrics.e2e_mean,
            metrics.wall_s,
            sum(spans),
            sum(use.busy_s for use in uses),
            metrics.preemptions,
        )

    def changes(self, before: "RunFigures") -> tuple[float, float, float]:
        """Return the changes of TTFT, JCT and resource time, in percent."""
        pairs = (self.ttft, before.ttft), (self.jct, before.jct), (self.resource, before.resource)
        return tuple(100 * (after / first - 1) for after, first in pairs)  # type: ignore[return-value]


def vllm(work: Work, cap: int = 16) -> RunFigures:
    """Run the baseline with a batch of at most ``cap`` requests."""
    config = load_run_file(FOLDER / "vllm.yaml", [f"engine.max_num_seqs={cap}"])
    return RunFigures.of(simulate(config, work))


def cluster(
    prefill: int = 1, decode: int = 1, accuracy: float = 1.0, settings: Sequence[str] = ()
) -> RunFile:
    """Return a cluster with these numbers of pairs of GPUs in each role."""
    ends = ["p, d"] + ["p, p"] * (prefill > 1) + ["d, d"] * (decode > 1)
    links = ", ".join(f"{{between: [{end}], gb_s: 25, latency_s: 0.00001}}" for end in ends)
    wanted = [
        f"links=[{links}]",
        f"groups.p.replicas={prefill}",
        f"groups.d.replicas={decode}",
        f"instances.prefill.replicas={prefill}",
        f"instances.decode.replicas={decode}",
        "system.prefill=[prefill]",
        "system.decode=[decode]",
        f"workload.predictor.accuracy={accuracy}",
    ]
    return load_run_file(FOLDER / "tetriinfer.yaml", [*wanted, *settings])


def tetriinfer(
    work: Work,
    prefill: int = 1,
    decode: int = 1,
    accuracy: float = 1.0,
    settings: Sequence[str] = (),
) -> RunFigures:
    """Run the system; by default, the right bucket of 200 tokens is predicted."""
    return RunFigures.of(simulate(cluster(prefill, decode, accuracy, settings), work))


def with_flips(
    work: Work, prefill: int, decode: int, settings: Sequence[str]
) -> tuple[RunFigures, int]:
    """Return a run's figures, and the number of flips."""
    metrics, run = recorded(cluster(prefill, decode, settings=settings), work, read_lines)
    return RunFigures.of(metrics), len(run.run["system_report"]["flips"])
