"""Searches of Vidur's space by ``jaxinfer plan``, each in a folder that is made once."""

import csv
import gzip
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from jaxinfer.errors import JaxinferError
from jaxinfer.files.kept import key_of
from jaxinfer.report.origin import origin
from scripts.reproduce.reproduction import Inputs
from scripts.reproduce.vidur_search.tables import GPUS, make_tables
from scripts.tables import CONFIGS, Row

PLAN = CONFIGS / "plan" / "vidur_70b.yaml"
ENGINES = yaml.safe_load(PLAN.read_text(encoding="utf-8"))["planner"]["engines"]
CHAT, ARXIV, BWB = "Chat-1M", "Arxiv-4K", "BWB-4K"
VIDUR, OWN, TRACE = "vidur", "aiconfigurator", "arxiv.csv.gz"
DRAWN = {CHAT: "chat_1m_4k", BWB: "bwb_4k"}
REQUESTS = 16_000


@dataclass(frozen=True)
class Searches:
    """Runs of the command, each in its own folder.

    Attributes:
        out: folder for the searches.
        tables: tables of operators by GPU.
        workloads: options of the workloads by name.
        jobs: number of processes.
        code: a digest of code and data.
    """

    out: Path
    tables: Mapping[str, Path]
    workloads: Mapping[str, Mapping[str, Any]]
    jobs: int
    code: str

    def run(self, name: str, work: str = CHAT, **changes: Any) -> Path:
        """Return the folder of a search, which is run unless the folder exists.

        An existing folder must be from the same settings, code and host, because seconds are
        reported.

        Args:
            changes: options of the planner; ``goal`` among them has options of the goal.
        """
        gpus = changes.get("gpus", dict.fromkeys(GPUS, 16))
        goal = changes.pop("goal", {})
        costs = {gpu: {"tables": str(self.tables[gpu])} for gpu in gpus}
        settings = {
            "run.workload": self.workloads[work],
            "planner.costs": costs,
            **{f"planner.{key}": value for key, value in changes.items()},
            **{f"goal.{key}": value for key, value in goal.items()},
        }
        folder = self.out / name
        took = folder / "took.json"
        made_by = key_of(settings, self.code, origin()["machine"])
        if took.is_file() and json.loads(took.read_text()).get("made_by") == made_by:
            return folder
        shutil.rmtree(folder, ignore_errors=True)
        words = [sys.executable, "-m", "jaxinfer", "plan", str(PLAN), "--out", str(folder)]
        words += ["--jobs", str(self.jobs)]
        words += [f"--set={key}={json.dumps(value)}" for key, value in settings.items()]
        print(f"searching: {name}", file=sys.stderr, flush=True)
        load, started, used = os.getloadavg()[0], time.perf_counter(), _cpu_seconds()
        done = subprocess.run(words, check=False, stdout=subprocess.DEVNULL)
        seconds, cpu_s = time.perf_counter() - started, _cpu_seconds() - used
        if not (folder / "plan.csv").is_file():
            raise JaxinferError(f"{name}: jaxinfer plan ended with {done.returncode}")
        noted = {
            "made_by": made_by,
            "settings": settings,
            "seconds": seconds,
            "cpu_s": cpu_s,
            "load": load,
            "jobs": self.jobs,
        }
        took.write_text(json.dumps(noted))
        return folder

    def rows(self, name: str, **how: Any) -> list[Row]:
        """Return the candidates of a search, with numbers as numbers."""
        with (self.run(name, **how) / "plan.csv").open(newline="") as file:
            return [
                {key: _number(text) for key, text in row.items()} for row in csv.DictReader(file)
            ]

    def exact(self, name: str, **how: Any) -> list[Row]:
        """Return the rows that were searched in full, the best first."""
        found = [row for row in self.rows(name, **how) if row["value"]]
        return sorted(found, key=lambda row: -row["value"])

    def one(self, name: str, row: Row, **how: Any) -> Row:
        """Return the row of one configuration; it has no value if it never meets the targets."""
        (found,) = self.rows(name, **only(row), **how)
        return found


def _cpu_seconds() -> float:
    """Return the CPU seconds of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _number(text: str) -> Any:
    try:
        return float(text) if "." in text or "e" in text else int(text)
    except ValueError:
        return text or None


def only(row: Row) -> Row:
    """Return planner options that leave one configuration."""
    return {
        "gpus": {row["gpu"]: 16},
        "tensor_parallel": [row["tp"]],
        "pipeline_parallel": [row["pp"]],
        "seqs_per_stage": [row["seqs_per_stage"]],
        "engines": {row["engine"]: ENGINES[row["engine"]]},
    }


def made(inputs: Inputs) -> Searches:
    """Return the searches; each one is run once."""
    profiles = inputs.path(VIDUR), inputs.path(OWN)
    tables = {gpu: make_tables(*profiles, gpu, inputs.kept / "tables") for gpu in GPUS}
    works: dict[str, Mapping[str, Any]] = {
        name: {"synthetic": {"lengths": lengths, "count": REQUESTS, "seed": 0}}
        for name, lengths in DRAWN.items()
    }
    trace = unpack(inputs.path(TRACE), inputs.kept / "arxiv.csv")
    works[ARXIV] = {"trace": str(trace), "limit": REQUESTS}
    code = inputs.code(VIDUR, OWN, TRACE)
    return Searches(inputs.kept / "searches", tables, works, inputs.jobs or 2, code)


def unpack(path: Path, to: Path) -> Path:
    """Unpack a trace to plain CSV."""
    to.write_bytes(gzip.decompress(path.read_bytes()))
    return to
