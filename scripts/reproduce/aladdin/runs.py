"""Aladdin's runs: workers, requests, and searches for the fewest workers that suffice."""

import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxinfer.config.run_file import RunFile, load_run_file
from jaxinfer.files.contents import contents
from jaxinfer.files.kept import KeptResults, key_of
from jaxinfer.papers.aladdin.sizing import fewest
from jaxinfer.simulate.capacity import load
from jaxinfer.simulate.targets import RequestTargets
from jaxinfer.workload.lengths import BenchRequest
from scripts.reproduce.reproduction import Work
from scripts.tables import CONFIGS

FILE = CONFIGS / "aladdin" / "llama2_7b.yaml"
TTFT_S, ATGT_S = 0.4, 0.015
# Limits for users, and the number of requests of a run.
LIMIT, REQUESTS = 2048, 1000


@dataclass(frozen=True)
class Way:
    """A system, and its knowledge of lengths.

    Attributes:
        name: name in tables.
        system: the run file's section ``system``.
        oracle: whether the predicted lengths are the true ones.
        settings: settings of the run file, for other workers than an A100.
        slo: targets of each request, in seconds.
    """

    name: str
    system: Mapping[str, Any]
    oracle: bool = False
    settings: tuple[str, ...] = ()
    slo: Mapping[str, float] = field(default_factory=lambda: {"ttft": TTFT_S, "tpot": ATGT_S})

    def config(self, tables: Path, workers: int) -> RunFile:
        """Return the run file for this number of workers."""
        settings = [
            f"groups.a100.replicas={workers}",
            f"instances.worker.replicas={workers}",
            f"simulate.tables={tables}",
            f"system={json.dumps(dict(self.system))}",
            f"workload.max_tokens={LIMIT}",
        ]
        if self.oracle:
            settings.append("workload.predictor={granularity: 1, accuracy: 1}")
        return load_run_file(FILE, [*settings, *self.settings])


JSQ = Way("shortest queue", {"name": "least_loaded"})
TWO = Way("power of two", {"name": "least_loaded", "choose": "power_of_two"})


def aladdin(theta: float, oracle: bool = True, **options: Any) -> Way:
    """Return Aladdin with true lengths, or with the means of earlier answers."""
    system = {"name": "aladdin", "ttft_s": TTFT_S, "atgt_s": ATGT_S, "theta": theta} | options
    return Way("Aladdin, true lengths" if oracle else "Aladdin, predicted", system, oracle)


def draw(trace: Work, seed: int, count: int = REQUESTS) -> list[BenchRequest]:
    """Draw different pairs from the whole trace; each of them fits on a worker."""
    return random.Random(seed).sample(list(trace), count)


class WorkerSearch:
    """Finds the fewest workers, and keeps the results of simulations in a file.

    Args:
        tables: tables of operators, unless a way's settings do without them.
        folder: folder for the files.
        code: a digest of everything that results depend on, except the requests.
        name: name of the file.
    """

    def __init__(
        self, trace: Work, tables: Path, folder: Path, code: str, name: str = "simulated"
    ) -> None:
        self.trace, self.tables, self.folder, self.code = trace, tables, folder, code
        self._kept = KeptResults(folder / f"{name}.jsonl", code)
        self._data = key_of(repr(trace), contents(str(tables)))

    def of(self, trace: Work, name: str) -> "WorkerSearch":
        """Return a search for other requests, or with its own file."""
        return WorkerSearch(trace, self.tables, self.folder, self.code, name)

    def keeps(self, way: Way, workers: int, rate: float, level: float, seed: int) -> bool:
        """True if this number of workers keeps both targets for this share of the requests."""
        other = [list(way.settings), dict(way.slo)] if way.settings else []
        asked = [way.name, dict(way.system), workers, rate, level, seed, REQUESTS, *other]
        key = key_of(self._data, asked)
        if self._kept.get(key) is None:
            config, work = way.config(self.tables, workers), draw(self.trace, seed)
            targets = RequestTargets(dict(way.slo), level)
            met = bool(load(config, work, targets, [seed], rate).verdict.met)
            self._kept.add(key, {"met": met})
        return bool(self._kept.get(key)["met"])

    def fewest(self, way: Way, rate: float, level: float, seed: int, guess: float) -> int | None:
        """Return the fewest workers; None if more than twice the guess are not enough."""
        most = math.ceil(2 * guess) + 8
        return fewest(lambda n: self.keeps(way, n, rate, level, seed), guess, most)
