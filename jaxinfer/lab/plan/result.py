"""Results of a search: all candidates, and the chosen run file."""

import csv
import hashlib
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from rich.table import Table
from scipy import stats

from jaxinfer.errors import JaxinferError
from jaxinfer.lab.plan.candidate import Candidate, Score
from jaxinfer.lab.plan.problem import Cost, Goal, Problem
from jaxinfer.lab.plan.search import DrivenSearch
from jaxinfer.simulate.capacity import too_few

# For each goal that is maximised, the phrase that follows the rate.
PER = {"cluster": "", "gpu": " per GPU", "usd": " per dollar an hour", "watt": " per watt"}

# For each goal that is minimised, the words for its unit.
COSTS = {"gpus": "GPUs", "usd": "dollars an hour", "watts": "watts"}


@dataclass(frozen=True)
class Choice:
    """The best candidate, simulated again as a whole.

    Attributes:
        score: score with the search's seeds.
        fresh: rates with other seeds, one each.
    """

    candidate: Candidate
    score: Score
    fresh: Sequence[float]

    @property
    def interval(self) -> tuple[float, float, float] | None:
        """Mean of the fresh rates, and both ends of its 95 % interval by Student's t."""
        if len(self.fresh) < 2:
            return None
        mean = float(np.mean(self.fresh))
        half = float(stats.t.ppf(0.975, len(self.fresh) - 1) * stats.sem(self.fresh))
        return mean, mean - half, mean + half


def rows(search: DrivenSearch) -> list[dict[str, Any]]:
    """Return the rows of the table: each candidate that was tried, its axes, costs and result.

    An axis with the name of another column becomes ``axes.`` and its name.
    """
    found: list[dict[str, Any]] = []
    front = {candidate.key for candidate in front_of(search)}
    for candidate, score in search.tried.values():
        costs = score.costs
        own = {
            "gpus": costs and costs.gpus,
            "usd_per_hour": costs and costs.usd,
            "watts": costs and costs.watts,
            "requests_s": score.rate if score.figures else None,
            "enough_requests": score.enough,  # None if there were enough.
            "given_up": score.given_up,
            # At a rate that misses the targets, it has no value.
            "value": search.value(score) if score.figures and not score.given_up else None,
            "front": "yes" if candidate.key in front else None,
            **{name.replace(" ", "_"): value for name, value in score.figures.items()},
            "refused": score.refused,
        }
        axes = {f"axes.{n}" if n in own else n: value for n, value in candidate.axes.items()}
        found.append(axes | own)
    return found


def best_few(search: DrivenSearch, count: int) -> Table:
    """Return the best candidates for the terminal, followed by those that were abandoned, if any.

    Only axes in which candidates differ have a column.
    """
    goal = search.problem.goal
    looked = [(c, s) for c, s in search.tried.values() if c.whole and s.costs and s.figures]
    full = [each for each in looked if not each[1].given_up and each[1].rate]
    full.sort(key=lambda each: -search.value(each[1]))
    others = [each for each in looked if each[1].given_up]
    others.sort(key=lambda each: -search.value(each[1]))
    shown, front = [*full, *others][:count], {c.key for c in front_of(search)}
    names = dict.fromkeys(name for c, _ in looked for name in c.axes)
    axes = [n for n in names if len({str(c.axes.get(n)) for c, _ in looked}) > 1]
    per = PER[goal.maximise or "cluster"]
    usd = any(s.costs and s.costs.usd is not None for _, s in shown)
    table = Table(box=None, pad_edge=False)
    for name in (*axes, "GPUs", *(["dollars/h"] if usd else []), "requests/s"):
        table.add_column(name, justify="left" if name in axes else "right")
    for name in ([f"requests/s{per}"] if per else []) + ["front"]:
        table.add_column(name, justify="left" if name == "front" else "right")
    for candidate, score in shown:
        assert score.costs
        below = "< " if score.given_up else ""
        rates = [score.rate, *([search.value(score)] if per else [])]
        table.add_row(
            *(_shown(candidate.axes.get(name)) for name in axes),
            str(score.costs.gpus),
            *([_shown(score.costs.usd)] if usd else []),
            *(f"{below}{rate:.4g}" for rate in rates),
            "*" if candidate.key in front else "",
        )
    return table


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def refusals(search: DrivenSearch) -> str | None:
    """Return a line with the number of refused candidates and the first reason, or None."""
    refused = [(c, s.refused) for c, s in search.tried.values() if s.refused]
    if not refused:
        return None
    candidate, why = refused[0]
    return (
        f"{len(refused)} of {len(search.tried)} candidates are not valid; for example {candidate}: "
        f"{' '.join(str(why).split())}"
    )


def write_table(path: Path, table: Sequence[Mapping[str, Any]]) -> None:
    """Write a CSV file; columns come in the order in which they first occur, ``refused`` last."""
    columns = list(dict.fromkeys(name for row in table for name in row))
    columns.sort(key="refused".__eq__)  # It comes last, because it is long.
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)


def value_in_words(goal: Goal, value: float) -> str:
    """Return a value of the goal in words, with the unit."""
    if goal.minimise:
        return f"{-value:g} {COSTS[goal.minimise]} at {goal.rate:g} requests/s"
    return f"{value:.4g} requests/s{PER[goal.maximise or 'cluster']}"


def head(search: DrivenSearch, choice: Choice, name: str) -> list[str]:
    """Return the comment lines that say where the run file comes from."""
    goal = search.problem.goal
    refused = sum(score.refused is not None for _, score in search.tried.values())
    costs = choice.score.costs
    assert costs
    price = "" if costs.usd is None else f", {costs.usd:g} dollars an hour"
    lines = [
        f"Found by jaxinfer plan with {search.problem.planner['name']}: the best of "
        f"{len(search.tried)} candidates, {refused} of which are not valid.",
        f"{value_in_words(goal, search.value(choice.score))}: "
        f"{choice.score.rate:.4g} requests/s on {costs.gpus} GPUs{price}; seeds 0 to "
        f"{goal.seeds - 1}.",
    ]
    if choice.score.enough:
        lines.append(too_few(choice.score.rate, choice.score.enough))
    wanted = choice.candidate.wanted
    if wanted and choice.score.rate * (1 + goal.precision) < wanted:
        lines.append(
            f"It serves {choice.score.rate:.4g} of the {wanted:g} requests/s in planner.rate: "
            "as a whole, the cluster serves less than its parts do alone. Raise planner.rate."
        )
    if choice.interval:
        mean, low, high = choice.interval
        first = goal.seeds
        lines.append(
            f"With the seeds {first} to {first + len(choice.fresh) - 1}, one by one: {mean:.4g} "
            f"requests/s, 95 % interval of the mean {low:.4g} to {high:.4g}."
        )
    elif choice.fresh:
        lines.append(f"With the seed {goal.seeds}: {choice.fresh[0]:.4g} requests/s.")
    if not goal.minimise:
        lines.append("Check it with: " + capacity_command(search.problem, name))
    return lines


def capacity_command(problem: Problem, name: str) -> str:
    """Return the command with which a user can find the rate of the chosen run file again."""
    goal = problem.goal
    words = ["jaxinfer capacity", shlex.quote(name), f"--slo {shlex.quote(goal.slo)}"]
    for option in ("attainment", "criterion", "requests_per_gpu", "precision"):
        if (value := getattr(goal, option)) != Goal.model_fields[option].default:
            words.append(f"--{option.replace('_', '-')} {value}")
    return " ".join([*words, f"--seeds {goal.seeds}"])


def write_run_file(
    path: Path, problem: Problem, candidate: Candidate, lines: list[str], force: bool = False
) -> None:
    """Write the chosen candidate's run file, with a comment that says where it comes from.

    Args:
        force: overwrite existing files.

    Raises:
        JaxinferError: the file exists, and was edited.
    """
    write_sealed(path, problem.run_file(candidate.part), lines, force)


def write_sealed(
    path: Path, data: Mapping[str, Any], lines: Sequence[str], force: bool = False
) -> None:
    """Write a run file with comment lines at the top, and a checksum at the end.

    Args:
        force: overwrite existing files.

    Raises:
        JaxinferError: the file exists, and was edited.
    """
    if path.exists() and not force and not is_untouched(path):
        raise JaxinferError(
            f"{path}: was edited since it was found here: move it away, or overwrite it with "
            "--force"
        )
    comment = "".join(f"# {line}\n" for line in lines)
    text = comment + yaml.safe_dump(data, sort_keys=False)
    path.write_bytes(text.encode() + _seal(text.encode()))


def _seal(data: bytes) -> bytes:
    """Return the last line of a file, which reveals edits."""
    return f"# sha256 of what is above: {hashlib.sha256(data).hexdigest()}\n".encode()


def is_untouched(path: Path) -> bool:
    """Tell whether a file is unchanged since ``write_sealed`` wrote it."""
    data = path.read_bytes()
    above, line, _ = data.rpartition(b"# sha256 of what is above: ")
    return bool(line) and data == above + _seal(above)


FrontPoint = tuple[float, float]


def frontier(points: Iterable[FrontPoint]) -> list[FrontPoint]:
    """Return, in order, the points that are on the Pareto front."""
    found: list[FrontPoint] = []
    for x, y in sorted(points):
        if not found or y < found[-1][1]:
            found.append((x, y))
    return found


def in_full(search: DrivenSearch) -> list[tuple[Candidate, Score]]:
    """Return candidates for whole requests whose largest rate is known."""
    return [
        (candidate, score)
        for candidate, score in search.tried.values()
        if candidate.whole and score.costs and not score.given_up and 0 < score.rate < math.inf
    ]


def cost_of(search: DrivenSearch) -> Cost:
    """Return the cost to compare: dollars if all candidates have a price, otherwise GPUs."""
    costs = [score.costs for _, score in search.tried.values() if score.costs]
    return "usd" if costs and all(each.usd is not None for each in costs) else "gpus"


def front_of(search: DrivenSearch) -> list[Candidate]:
    """Return the candidates of ``in_full`` on the Pareto front of cost and rate, cheapest first.

    Among equal candidates, the first that was tried counts.
    """
    of, found = cost_of(search), in_full(search)
    points = [(s.costs.amount(of), -s.rate) for _, s in found if s.costs]
    best = frontier(points)
    return [found[points.index(point)][0] for point in best]
