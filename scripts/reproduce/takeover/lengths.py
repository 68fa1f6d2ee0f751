"""Lengths that are not uniform: drawn from a lognormal distribution, and from traces."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log
from statistics import mean

from jaxinfer.workload.bench_request import BenchRequest
from scripts.reproduce.reproduction import CODE, CONVERSATIONS, SHAREGPT, Work
from scripts.reproduce.takeover.cases import PAIRS, Cell

CLUSTER = "A100+A10"
SPREAD = (*PAIRS, "L40S+A10G")
LOADED = (CLUSTER, "L40S+A10G")
# For each file of ``--data``, a name and a description.
TRACES = {
    "azure_code.csv": ("Azure code", CODE),
    "azure_conversation.csv": ("Azure conversations", CONVERSATIONS),
    "sharegpt.csv": ("ShareGPT", SHAREGPT),
}
# Medians of prompts and answers, and the standard deviations of their logarithms.
LOGNORMAL, MEDIANS, DEVIATION = "lognormal 700/90", (700, 90), 0.7
# Tokens of the longest request; it also fits into an A10.
LONGEST, MOST = 8000, 2000


@dataclass(frozen=True)
class Drawn(Cell):
    """Requests of given lengths on a cluster; ``prompt`` and ``answer`` are their means.

    Attributes:
        called: name of the workload.
        lengths: lengths of each request. A run takes as many as it needs, from a start that depends
            on its seed.
    """

    called: str = ""
    lengths: tuple[tuple[int, int], ...] = ()

    @property
    def name(self) -> str:
        """Name of the lengths."""
        return self.called

    def work(self, seed: int, count: int) -> list[BenchRequest]:
        """Return the requests in their order; all arrive at the start."""
        start = seed * count % max(len(self.lengths) - count, 1)
        found = self.lengths[start : start + count]
        return [BenchRequest(None, prompt, answer, 0.0) for prompt, answer in found]


def drawn(cluster: str, traces: Mapping[str, Work]) -> Sequence[Drawn]:
    """Return a cluster's cells: lognormal lengths, and those of each trace."""
    rng = random.Random(0)
    lognormal = [
        tuple(max(round(rng.lognormvariate(log(each), DEVIATION)), 1) for each in MEDIANS)
        for _ in range(3 * MOST)
    ]
    found = {LOGNORMAL: lognormal}
    for file, (name, _) in TRACES.items():
        found[name] = [(item.prompt_len, item.max_tokens) for item in traces[file]]
    made = []
    for name, lengths in found.items():
        kept = tuple((p, a) for p, a in lengths if p + a <= LONGEST)[: 3 * MOST]
        prompt, answer = (round(mean(each)) for each in zip(*kept, strict=True))
        made.append(Drawn(cluster, prompt, answer, name, kept))
    return made
