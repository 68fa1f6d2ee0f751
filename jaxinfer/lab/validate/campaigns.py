"""Campaigns of measurements, and rules that make a run file from each row of their results."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from jaxinfer.config.run_file import RunFile, as_run_file, put_option
from jaxinfer.errors import JaxinferError
from jaxinfer.files.shipped import data_path
from jaxinfer.lab.validate.points import COLUMNS, OPTIONAL, Point
from jaxinfer.options.validation import (
    OptionError,
    Options,
    did_you_mean,
    read_yaml,
    shown,
    within,
)

# Columns whose values in ``when`` are regular expressions.
_PATTERNS = ("id", "backend_version")
_NUMBERS = ("concurrency", "isl", "osl", "tp", "moe_ep")
# A closed-loop client's turnaround.
_CLIENT_S = 0.002
# More than this takes minutes, and much more is a mistake.
_MOST_REQUESTS = 1_000_000


class Client(Options):
    """How the client of a point sends requests, by keys that rules set next to those of run files.

    Attributes:
        rounds: Total number of requests, in multiples of the concurrency.
        first_wave: Weight of the requests sent first in the mean; None to count all requests
            equally.
        shortest: Smallest length, as a fraction of the nominal one; lengths are uniform from there
            on.
    """

    rounds: int = Field(default=10, ge=1)
    first_wave: float | None = Field(default=None, ge=0, le=1)
    shortest: float = Field(default=1.0, gt=0, le=1)


class Above(Options):
    """A condition on a number in a row: ``{above: 32}``."""

    above: float


class Rule(Options):
    """A part of the run file for all rows that match a condition.

    Attributes:
        name: Name by which the rule can be left out.
        when: Columns and the values that a row must have there.
        set: Dotted keys of the run file and their values.
    """

    name: str
    when: dict[str, Any]
    set: dict[str, Any] = Field(min_length=1)

    def model_post_init(self, context: Any, /) -> None:
        """Refuse conditions that a row cannot be compared with, and keys that cannot be set."""
        for column, wanted in self.when.items():
            try:
                _check_wanted(column, wanted)
            except JaxinferError as error:
                raise within(f"when.{column}", error) from None
        for key, value in self.set.items():
            try:
                _check_sums(value)
                if key in Client.model_fields and not isinstance(value, dict):
                    Client.model_validate({key: value})
            except OptionError as error:
                raise within("set", error) from None
            except JaxinferError as error:
                raise within(f"set.{key}", error) from None

    def holds(self, point: Point, but: str = "") -> bool:
        """Tell whether a row satisfies ``when``, in all columns or in all except one."""
        return all(_is(point, name, value) for name, value in self.when.items() if name != but)


class Campaigns(Options):
    """A campaign file.

    Attributes:
        models: our name for each model in the column ``model_path``.
        cards: our name for each card in the column ``system``.
        named: Columns for which a matching rule must name the row's value; otherwise the row is
            refused.
        rules: Rules in their order; of two with the same key, the later one counts.
    """

    models: dict[str, str]
    cards: dict[str, str]
    named: tuple[str, ...] = Field(default=("gemm_quant_mode",), strict=False)
    rules: tuple[Rule, ...] = Field(strict=False)

    def check_columns(self, columns: Collection[str]) -> None:
        """Refuse a rule that asks for a column that the points lack."""
        known = {*columns, *_NUMBERS, *COLUMNS, *OPTIONAL}
        asked = [(f"rule {r.name}: when", name) for r in self.rules for name in r.when]
        for where, name in [*asked, *(("named", name) for name in self.named)]:
            if name not in known:
                raise JaxinferError(f"{where}: no column {name!r}, {did_you_mean(name, known)}")

    def refuse_unnamed(self, point: Point) -> None:
        """Refuse a row with a value that no rule covers."""
        unheld: dict[str, list[Rule]] = {}
        for column in self.named:
            rules = [rule for rule in self.rules if column in rule.when]
            known = _wanted(rules, column)
            if any(rule.holds(point) for rule in rules):
                continue
            if any(_is(point, column, each) for each in known):
                unheld[column] = rules
            elif value := _cell(point, column):
                texts = list(dict.fromkeys(str(each) for each in known if each != ""))
                meant = did_you_mean(str(value), texts)
                if column in _PATTERNS:
                    own = _wanted([r for r in rules if r.holds(point, but=column)], column)
                    meant = f"known: {', '.join(own or texts)}"
                raise OptionError(f"{column} is {shown(value)}, which no rule is for: {meant}")
        for column, rules in unheld.items():
            also = dict.fromkeys(name for rule in rules for name in rule.when if name != column)
            others = ", ".join(f"{name} {shown(_cell(point, name))}" for name in also)
            value = shown(_cell(point, column))
            raise OptionError(f"{column} is {value}: no rule is for it with {others}")


@dataclass(frozen=True)
class PointSetup:
    """The engine and the client of a point.

    Attributes:
        data: contents of the run file, with the workload.
        first_wave: weight of the requests sent first in the mean; None to count all equally.
    """

    data: Mapping[str, Any]
    first_wave: float | None

    @property
    def config(self) -> RunFile:
        """The checked run file; raises JaxinferError if it is invalid."""
        return as_run_file(self.data)

    @property
    def simulated_as(self) -> str:
        """Versions of the scheduler and of the tables, as text."""
        found = []
        for path, key in ((("engine",), "like"), (("simulate", "tables"), "version")):
            at: Any = self.data
            for name in path:
                at = at.get(name) if isinstance(at, dict) else None
            found.append(at.get(key) if isinstance(at, dict) else None)
        return f"scheduler {found[0] or 'of its own options'}, tables {found[1] or 'of no version'}"


def read_campaigns(path: str, without: Collection[str] = ()) -> Campaigns:
    """Read a file of campaigns.

    Args:
        without: names of rules to leave out.

    Raises:
        JaxinferError: the file cannot be read, or lacks such a rule.
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
        settings: dotted keys of the run file that take precedence over all rules.

    Raises:
        JaxinferError: the point's model or card is unknown, or a key names no option.
    """
    row = point.row
    model = _name(campaigns.models, "model_path", row["model_path"])
    card = _name(campaigns.cards, "system", row["system"])
    if point.stages != 1:
        raise JaxinferError(f"pp_size is {point.stages}: points with pipelines are not simulated")
    campaigns.refuse_unnamed(point)
    data: dict[str, Any] = {
        "model": model,
        "engine": {"enable_prefix_caching": False},
        "groups": {"cards": {"kind": card, "devices": point.tp}},
        "instances": {"engine": {"group": "cards"}},
        "simulate": {"tables": {"folder": operators, "backend": row["backend"]}},
    }
    if point.attention_dp > 1:
        # Replicas of attention, each on its own GPUs, and experts that all of them share.
        data["groups"]["cards"]["replicas"] = point.attention_dp
        data["instances"]["engine"]["replicas"] = point.attention_dp
        data["simulate"]["shared_experts"] = ["engine"]
        data["system"] = "least_loaded"
    given = [(k, v) for rule in campaigns.rules if rule.holds(point) for k, v in rule.set.items()]
    own: dict[str, Any] = {}
    for key, value in [*given, *settings.items()]:
        if key.partition(".")[0] == "workload":
            raise OptionError(f"{key}: the row is the workload; rounds and shortest may be set")
        if key in Client.model_fields:
            own[key] = _reckoned(value, point)
        else:
            put_option(data, key, _reckoned(value, point))
    client = Client.model_validate(own)
    data["workload"] = _workload(point, client)
    return PointSetup(data, client.first_wave)


def _workload(point: Point, client: Client) -> dict[str, Any]:
    """Return fixed lengths, or uniform ones from a fraction of the nominal ones on."""
    count = client.rounds * point.concurrency
    if count > _MOST_REQUESTS:
        raise JaxinferError(
            f"{client.rounds} rounds of {point.concurrency} at once are {count:,} requests, must "
            f"be at most {_MOST_REQUESTS:,}"
        )

    def lengths(most: int) -> object:
        least = max(int(most * client.shortest), 1)
        return most if least == most else {"kind": "uniform", "min": least, "max": most}

    return {
        "synthetic": {
            "input_len": lengths(point.isl),
            "output_len": lengths(point.osl),
            "count": count,
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


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _wanted(rules: Sequence[Rule], column: str) -> list[Any]:
    """Return the values that rules name for a column."""
    return [value for rule in rules for value in _as_list(rule.when[column])]


def _check_wanted(column: str, wanted: Any) -> None:
    """Refuse a value that cannot be compared with a row's."""
    if isinstance(wanted, dict):
        if column not in _NUMBERS:
            raise JaxinferError(f"{shown(wanted)}, is for {', '.join(_NUMBERS)} alone")
        Above.model_validate(wanted)
        return
    kind, words = (int, "an integer") if column in _NUMBERS else (str, "text, as the CSV has it")
    if not (several := _as_list(wanted)) or not all(type(each) is kind for each in several):
        raise JaxinferError(f"{shown(wanted)}, must be {words}, or a list of them")
    if column in _PATTERNS:
        for each in several:
            try:
                re.compile(each)
            except (re.error, OverflowError, RecursionError) as error:
                raise JaxinferError(f"{shown(each)}: no regular expression: {error}") from None


def _cell(point: Point, column: str) -> Any:
    return getattr(point, column) if column in _NUMBERS else point.row.get(column, "")


def _is(point: Point, name: str, wanted: Any) -> bool:
    value = _cell(point, name)
    if isinstance(wanted, dict):
        return bool(value > wanted["above"])
    if name in _PATTERNS:
        return any(re.match(each, value) is not None for each in _as_list(wanted))
    return value in _as_list(wanted)


def _is_sum(value: Any) -> bool:
    """Tell whether a mapping describes a sum of a row's numbers."""
    return bool(value) and value.keys() <= {*_NUMBERS, "add", "multiple"}


def _check_sums(value: Any) -> None:
    if not isinstance(value, dict):
        return
    if not _is_sum(value):
        for item in value.values():
            _check_sums(item)
    elif not all(type(number) is int for number in value.values()):
        raise JaxinferError(f"{shown(value)}, must have integers alone")
    elif value.get("multiple", 1) < 1:
        raise JaxinferError(f"{shown(value)}: multiple must be 1 or more")


def _reckoned(value: Any, point: Point) -> Any:
    """Return a value, or the sum of a row's numbers that it describes."""
    if not isinstance(value, dict):
        return value
    if not _is_sum(value):
        return {key: _reckoned(item, point) for key, item in value.items()}
    _check_sums(value)
    total = value.get("add", 0) + sum(
        count * getattr(point, name) for name, count in value.items() if name in _NUMBERS
    )
    multiple = value.get("multiple", 1)
    return -(-total // multiple) * multiple
