"""Experiments with stages of load: reads rows of a CSV, and makes each one's run file and requests.

A row has the figures of one stage of an experiment, or of all (stage -1), and what other simulators
predicted.
"""

import csv
import itertools
import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
from pydantic import Field

from jaxinfer.config.run_file import RunFile, as_run_file, put_option
from jaxinfer.errors import JaxinferError
from jaxinfer.files.shipped import data_path, why_not
from jaxinfer.options.validation import OptionError, Options, did_you_mean, read_yaml, shown
from jaxinfer.workload.bench_request import BenchRequest

FIGURES = (
    "e2e_mean", "e2e_p90", "e2e_p99", "ttft_mean", "ttft_p90", "ttft_p99", "itl_mean",
)  # fmt: skip
NAMES = (
    "experiment", "workload", "stage", "model", "gpu", "precision", "tensor_parallel",
    "max_num_batched_tokens",
)  # fmt: skip
ALL_STAGES = -1
_MOST = 1_000_000
_PREDICTED = re.compile(rf"(.+):({'|'.join(FIGURES)})$")


class ExperimentCard(Options):
    """A card: its name in ``configs/gpus.yaml`` (``kind``), and the ``version`` of its tables."""

    kind: str
    version: str


Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class ExperimentLoad(Options):
    """The requests of a workload.

    Attributes:
        name: Part of the names of its experiments, or the value in their column ``workload``.
        prompt, output: Tokens of each request.
        rates: Requests per second, by stage.
        why_not: Reason why it cannot be simulated.
    """

    name: str
    prompt: int = Field(default=0, ge=0)
    output: int = Field(default=0, ge=0)
    rates: tuple[Rate, ...] = Field(default=(), strict=False)
    why_not: str = ""

    def model_post_init(self, context: Any, /) -> None:
        """Refuse a workload without requests."""
        if not self.why_not and not (self.prompt and self.output and self.rates):
            raise OptionError(f"workload {self.name} needs prompt, output and rates, or why_not")


class Prompts(Options):
    """A set of prompts that a client sends repeatedly.

    Attributes:
        groups: Number of groups of prompts with a common prefix.
        each: Number of prompts in a group.
        shared: Tokens of the prefix that the prompts of a group share.
    """

    groups: int = Field(ge=1)
    each: int = Field(ge=1)
    shared: int = Field(ge=0)

    def tokens(self, length: int) -> list[list[int]]:
        """Return all prompts, each of ``length`` tokens, in a random order."""
        found = []
        for group in range(self.groups):
            first = [group] * min(self.shared, length)
            for number in range(self.each):
                own = self.groups + group * self.each + number
                found.append(first + [own] * (length - len(first)))
        random.Random(0).shuffle(found)
        return found


class Experiments(Options):
    """A file that describes how experiments were run.

    Attributes:
        models, cards: Our model or card for each value in the columns ``model`` and ``gpu``.
        formats: Keys of run files and their values, for each value in the column ``precision``.
        set: Keys of all run files, and their values.
        prompts: Prompts that are sent repeatedly; by default, prompts have no tokens in common.
        stage_s: Duration of a stage in seconds.
        workloads: Workloads; an experiment uses the first one whose name is part of its own.
    """

    models: dict[str, str]
    cards: dict[str, ExperimentCard]
    formats: dict[str, dict[str, Any]]
    set: dict[str, Any]
    prompts: Prompts | None = None
    stage_s: float = Field(gt=0)
    workloads: tuple[ExperimentLoad, ...] = Field(strict=False)

    @classmethod
    def read(cls, path: str) -> Self:
        """Read a file that describes experiments; raise JaxinferError if it is invalid."""
        try:
            return cls.model_validate(read_yaml(Path(data_path(path))))
        except JaxinferError as error:
            raise JaxinferError(f"experiments {path}: {error}") from None


@dataclass(frozen=True)
class StageRow:
    """A row: the figures of a stage, in milliseconds.

    Attributes:
        row: all columns as given.
        line: line of the file.
        stage: number of the stage; -1 for all.
        measured: the given measurements, by figure.
        predicted: the given predictions, by simulator and figure.
        wrong: reason why the row does not count; empty if it does.
    """

    row: Mapping[str, str]
    line: int
    stage: int = ALL_STAGES
    measured: Mapping[str, float] = field(default_factory=dict)
    predicted: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    wrong: str = ""

    @property
    def experiment(self) -> str:
        """Name of the experiment."""
        return self.row["experiment"]


def is_experiments(path: Path) -> bool:
    """Tell whether a file's columns are those of experiments."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            header = next(csv.reader(file), [])
    except (OSError, UnicodeDecodeError, csv.Error):
        return False
    return "experiment" in header and "measured_e2e_mean_ms" in header


def read_experiments(path: Path) -> list[StageRow]:
    """Read the rows; if a row is unreadable or repeated, ``wrong`` says so.

    Raises:
        JaxinferError: the file cannot be read, or lacks a column.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            rows = [(reader.line_num, row) for row in reader]
    except OSError as error:
        raise JaxinferError(f"{path}: {why_not(path, error)}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise JaxinferError(f"{path}: not CSV: {error}") from None
    if missing := [name for name in NAMES if name not in (reader.fieldnames or ())]:
        raise JaxinferError(f"{path}: lacks the column {missing[0]}")
    if not rows:
        raise JaxinferError(f"{path}: has no rows")
    found: list[StageRow] = []
    seen: set[tuple[object, ...]] = set()
    for line, row in rows:
        each = _read_row(line, {str(k): v or "" for k, v in row.items() if k is not None})
        key = (each.experiment, *each.measured.items())
        if not each.wrong and key in seen:
            each = StageRow(each.row, line, each.stage, wrong="the same as a row before")
        seen.add(key)
        found.append(each)
    return found


def _read_row(line: int, row: dict[str, str]) -> StageRow:
    try:
        stage = int(row["stage"])
    except ValueError:
        return StageRow(row, line, wrong=f"stage is {shown(row['stage'])}, must be an integer")
    if stage < ALL_STAGES:
        return StageRow(row, line, wrong=f"stage is {stage}, must be at least {ALL_STAGES}")
    measured: dict[str, float] = {}
    predicted: dict[str, dict[str, float]] = {}
    for name, text in row.items():
        figure = name.removeprefix("measured_").removesuffix("_ms")
        own = name == f"measured_{figure}_ms" and figure in FIGURES
        other = _PREDICTED.match(name)
        if not text.strip() or not (own or other):
            continue
        value = _milliseconds(text)
        if value is None:
            return StageRow(row, line, stage, wrong=f"{name} is {shown(text)}, must be above 0")
        if other:
            predicted.setdefault(other[1], {})[other[2]] = value
        else:
            measured[figure] = value
    wrong = "" if measured else "has no measured figure"
    return StageRow(row, line, stage, measured, predicted, wrong)


def _milliseconds(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < math.inf else None


@dataclass(frozen=True)
class ExperimentSetup:
    """An experiment's requests and run file, as the contents of a YAML file.

    Attributes:
        loads: number of requests and seconds of each stage.
        prompts: see ``Experiments``.
    """

    data: Mapping[str, Any]
    prompt: int
    output: int
    loads: Sequence[tuple[int, float]]
    prompts: Prompts | None = None

    @property
    def config(self) -> RunFile:
        """The checked run file; raises JaxinferError if it is invalid."""
        return as_run_file(self.data)

    def requests(self) -> list[BenchRequest]:
        """Return requests at the rate of each stage, at random times as inference-perf draws."""
        rng = np.random.default_rng(0)
        tokens = self.prompts.tokens(self.prompt) if self.prompts else [None]
        prompts = itertools.cycle(tokens)
        found, start = [], 0.0
        for count, seconds in self.loads:
            gaps = rng.exponential(size=count)
            times = start + np.cumsum(gaps) * (seconds / gaps.sum())
            found += [
                BenchRequest(next(prompts), self.prompt, self.output, float(at)) for at in times
            ]
            start += seconds
        return found


def set_up(
    about: Experiments, row: StageRow, stages: set[int], operators: str, settings: Mapping[str, Any]
) -> ExperimentSetup:
    """Make the run file of an experiment from any of its rows.

    Args:
        stages: numbers of the stages to simulate; empty for all stages of the workload.
        operators: folder of tables.
        settings: dotted keys of the run file, which take precedence over all others.  Raises:
        JaxinferError: a value of the row is not known or cannot be modelled.
    """
    given = row.row
    load = _load(about, given)
    if load.why_not:
        raise JaxinferError(f"workload {load.name}: {load.why_not}")
    if beyond := [stage for stage in sorted(stages) if stage >= len(load.rates)]:
        raise JaxinferError(
            f"has a stage {beyond[0]}, workload {load.name} has rates of {len(load.rates)}"
        )
    if given.get("host_kv_offload", "").strip().lower() in ("true", "1", "yes"):
        raise JaxinferError("host_kv_offload: KV in the host's memory is not modelled")
    model = _known(about.models, "model", given["model"])
    card = _known(about.cards, "gpu", given["gpu"])
    devices = _count("tensor_parallel", given["tensor_parallel"])
    data: dict[str, Any] = {
        "model": model,
        "groups": {"cards": {"kind": card.kind, "devices": devices}},
        "instances": {"engine": {"group": "cards"}},
    }
    own: dict[str, Any] = {
        "simulate.tables.folder": operators,
        "simulate.tables.version": card.version,
        "engine.max_num_batched_tokens": _count(
            "max_num_batched_tokens", given["max_num_batched_tokens"]
        ),
    }
    if share := given.get("gpu_memory_utilization", "").strip():
        own["engine.memory_fraction"] = _share("gpu_memory_utilization", share)
    formats = _known(about.formats, "precision", given["precision"])
    for key, value in [*(about.set | formats | own | dict(settings)).items()]:
        put_option(data, key, value)
    rates = load.rates[: max(stages) + 1] if stages else load.rates
    loads = [(round(rate * about.stage_s), about.stage_s) for rate in rates]
    counts = [count for count, _ in loads]
    if min(counts) < 1 or sum(counts) > _MOST:
        raise JaxinferError(
            f"stages of {about.stage_s:g} s have {', '.join(map(str, counts))} requests, must have "
            f"at least 1 each and at most {_MOST} together: give another stage_s"
        )
    return ExperimentSetup(data, load.prompt, load.output, loads, about.prompts)


def _load(about: Experiments, given: Mapping[str, str]) -> ExperimentLoad:
    for load in about.workloads:
        if load.name in given["experiment"]:
            return load
    for load in about.workloads:
        if load.name == given["workload"]:
            return load
    names = [load.name for load in about.workloads]
    raise OptionError(f"workload is {given['workload']}: {did_you_mean(given['workload'], names)}")


def _known(known: Mapping[str, Any], column: str, value: str) -> Any:
    if value not in known:
        raise OptionError(f"{column} is {value}: {did_you_mean(value, known)}")
    return known[value]


def _count(name: str, text: str) -> int:
    value = _milliseconds(text)
    if value is None or value != int(value) or value > _MOST:
        raise JaxinferError(f"{name} is {shown(text)}, must be an integer from 1 to {_MOST}")
    return int(value)


def _share(name: str, text: str) -> float:
    value = _milliseconds(text)
    if value is None or value > 1:
        raise JaxinferError(f"{name} is {shown(text)}, must be above 0, and 1 at most")
    return value
