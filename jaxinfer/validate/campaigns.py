"""Campaigns of measurement: rules that make a run file of each row."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from jaxinfer.config.run_file import RunFile, as_run_file, put_option
from jaxinfer.errors import JaxinferError
from jaxinfer.files.shipped import data_path
from jaxinfer.options.validation import OptionError, Options, did_you_mean, read_yaml, shown
from jaxinfer.validate.points import Point

# The columns whose values in ``when`` are regular expressions.
_PATTERNS = ("id", "backend_version")
_NUMBERS = ("concurrency", "isl", "osl", "tp", "moe_ep")
# A closed-loop client's turnaround.
_CLIENT_S = 0.002


class Rule(Options):
    """A part of run files that some rows have in common.

    Attributes:
        name: Name by which it can be left out.
        when: Columns and their values, all of which a row must have.
        set: Dotted keys of the run file and their values.
    """

    name: str
    when: dict[str, Any]
    set: dict[str, Any] = Field(min_length=1)

    def holds(self, point: Point) -> bool:
        """Tell whether a row is as ``when`` says."""
        return all(_is(point, name, value) for name, value in self.when.items())


class Campaigns(Options):
    """A file of campaigns.

    Attributes:
        models, cards: Names of ours, by those in the rows' ``model_path`` and ``system``.
        rules: Rules in their order; of two with one key, the later one counts.
    """

    models: dict[str, str]
    cards: dict[str, str]
    rules: tuple[Rule, ...] = Field(strict=False)


@dataclass(frozen=True)
class PointSetup:
    """A point's engine and client.

    Attributes:
        data: run file, with the workload, as YAML would hold it.
        first_wave: weight of the requests sent at once, of all; None for as many as they are.
    """

    data: Mapping[str, Any]
    first_wave: float | None

    @property
    def config(self) -> RunFile:
        """The run file, checked; raises JaxinferError where it cannot be."""
        return as_run_file(self.data)


def read_campaigns(path: str, without: Collection[str] = ()) -> Campaigns:
    """Read a file of campaigns.

    Args:
        without: names of rules that are left out.

    Raises:
        JaxinferError: it cannot be read, or has no such rule.
    """
    try:
        found = Campaigns.model_validate(read_yaml(Path(data_path(path))))
    except JaxinferError as error:
        raise JaxinferError(f"campaigns {path}: {error}") from None
    names = [rule.name for rule in found.rules]
    for name in without:
        if name not in names:
            raise JaxinferError(f"--without {name}: no such rule, {did_you_mean(name, names)}")
    kept = tuple(rule for rule in found.rules if rule.name not in without)
    return found.model_copy(update={"rules": kept})


def launch(
    campaigns: Campaigns, point: Point, operators: str, settings: Mapping[str, Any]
) -> PointSetup:
    """Make the run file of a point.

    Args:
        operators: folder of tables.
        settings: dotted keys of the run file that count before all rules.

    Raises:
        JaxinferError: its model or card is not known, or a key leads nowhere.
    """
    row = point.row
    model = _name(campaigns.models, "model_path", row["model_path"])
    card = _name(campaigns.cards, "system", row["system"])
    stages = int(float(row["pp_size"] or 1))
    if stages != 1:
        raise JaxinferError(f"pp_size is {stages}: points with pipelines are not simulated")
    own: dict[str, Any] = {"rounds": 10, "first_wave": None, "shortest": 1.0}
    data: dict[str, Any] = {
        "model": model,
        "engine": {"enable_prefix_caching": False},
        "groups": {"cards": {"kind": card, "devices": point.tp}},
        "instances": {"engine": {"group": "cards"}},
        "simulate": {"tables": {"folder": operators, "backend": row["backend"]}},
    }
    if point.attention_dp > 1:
        # Replicas of attention, each on GPUs of its own, beside experts that all share.
        data["groups"]["cards"]["replicas"] = point.attention_dp
        data["instances"]["engine"]["replicas"] = point.attention_dp
        data["simulate"]["shared_experts"] = ["engine"]
        data["system"] = "least_loaded"
    given = [(k, v) for rule in campaigns.rules if rule.holds(point) for k, v in rule.set.items()]
    for key, value in [*given, *settings.items()]:
        if key in own:
            own[key] = _reckoned(value, point)
        else:
            put_option(data, key, _reckoned(value, point))
    data["workload"] = _workload(point, own)
    return PointSetup(data, own["first_wave"])


def _workload(point: Point, own: Mapping[str, Any]) -> dict[str, Any]:
    """Fixed lengths, or even ones from a share of the nominal ones on."""

    def lengths(most: int) -> object:
        least = int(most * own["shortest"])
        return most if least == most else {"kind": "uniform", "min": least, "max": most}

    return {
        "synthetic": {
            "input_len": lengths(point.isl),
            "output_len": lengths(point.osl),
            "count": own["rounds"] * point.concurrency,
        },
        "arrivals": {
            "kind": "closed",
            "concurrency": point.concurrency,
            "think_s": _CLIENT_S,
        },
    }


def _name(known: Mapping[str, str], column: str, value: str) -> str:
    if value not in known:
        raise OptionError(f"{column} is {value}: {did_you_mean(value, known)}")
    return known[value]


def _is(point: Point, name: str, wanted: Any) -> bool:
    value = getattr(point, name) if name in _NUMBERS else point.row.get(name)
    if isinstance(wanted, dict):
        return bool(value > wanted["above"])
    if name in _PATTERNS:
        return re.match(str(wanted), str(value)) is not None
    return value in wanted if isinstance(wanted, list | tuple) else value == wanted


def _reckoned(value: Any, point: Point) -> Any:
    """A value, or the sum of a row's numbers that it describes."""
    if not isinstance(value, dict):
        return value
    if not value.keys() <= {*_NUMBERS, "add", "multiple"}:
        return {key: _reckoned(item, point) for key, item in value.items()}
    if not all(isinstance(number, int) for number in value.values()):
        raise JaxinferError(f"campaigns: {shown(value)} must have integers alone")
    total = value.get("add", 0) + sum(
        count * getattr(point, name) for name, count in value.items() if name in _NUMBERS
    )
    multiple = value.get("multiple", 1)
    return -(-total // multiple) * multiple
