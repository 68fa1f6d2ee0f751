"""Divide TPOT that a run of measured points lacks into parts that tell its cause.

    python -m scripts.validate.silicon_parts DIR/variant0 OUT.csv --operators FOLDER

DIR/variant0 is a folder of ``jaxinfer check points``, such as ``scripts.validate.silicon`` makes.
For each model, card, engine and degree of tensor parallelism with at least seven points, measured
less predicted TPOT is fitted by a constant, a part for each sequence of a step, and a part for each
prompt token that a request's own answer waits for (there are ``concurrency * isl / osl`` per token
of the answer). Squares of relative errors are least. For groups with at least twenty points, each
length of prompts has a part of its own in a second fit; the operators tell how long the step of one
such prompt is predicted to take. Nothing of all this enters predictions.
"""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import click
import numpy as np

from jaxinfer.lab.validate.campaigns import launch, read_campaigns
from jaxinfer.lab.validate.points import Point, read_points, uses
from jaxinfer.serving.batch import Work
from jaxinfer.simulate.run import prepare
from scripts.tables import Row, read_csv, show_table, write_csv

FEWEST, MANY = 7, 20
Groups = dict[tuple[str, ...], list[Point]]
Predicted = Mapping[str, float]


@click.command()
@click.argument("run", type=click.Path(exists=True, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--operators", required=True)
def main(run: Path, out: Path, operators: str) -> None:
    """Write and print a row for each group, and for each length of its prompts."""
    predicted = {str(each["id"]): each["tpot_ms"] for each in read_csv(run / "points.csv")}
    groups = read_groups(run / "points.csv", predicted)
    rows = [named(name) | fit(group, predicted) for name, group in groups.items()]
    by_length = [
        named(name) | each
        for name, group in groups.items()
        if len(group) >= MANY
        for each in fit_lengths(group, predicted, operators)
    ]
    for path, table in ((out, rows), (out.with_stem(f"{out.stem}_lengths"), by_length)):
        write_csv(path, table)
        show_table(table)


def read_groups(path: Path, predicted: Predicted) -> Groups:
    """Return the points that count, by model, card, engine, version and GPUs."""
    points = read_points(path)
    found = defaultdict(list)
    for point, use in zip(points, uses(points), strict=True):
        if use.tpot and predicted[point.id]:
            found[*point.group, str(point.tp)].append(point)
    return {name: group for name, group in sorted(found.items()) if len(group) >= FEWEST}


def named(name: tuple[str, ...]) -> Row:
    """Return the first columns of a group."""
    model, *others, tp = name
    return {"group": " ".join([model.rpartition("/")[2], *others]).strip(), "GPUs": tp}


def fit(group: list[Point], predicted: Predicted) -> Row:
    """Return the parts of a group, and median errors before and after they are added."""
    measured, short = errors(group, predicted)
    terms = [[1, p.concurrency, p.concurrency * p.isl / p.osl] for p in group]
    (constant, sequence, token), left = least(terms, measured, short)
    return {
        "n": len(group),
        "ms per step": round(constant, 2),
        "us per sequence": round(1e3 * sequence),
        "us per prompt token": round(1e3 * token, 1),
        "error %": median(short / measured),
        "left %": median(left / measured),
    }


def fit_lengths(group: list[Point], predicted: Predicted, operators: str) -> list[Row]:
    """Return for each length of prompts what their steps lack, beside their predicted time."""
    measured, short = errors(group, predicted)
    lengths = sorted({p.isl for p in group})
    terms = [
        [1, p.concurrency, *(p.concurrency / p.osl * (p.isl == each) for each in lengths)]
        for p in group
    ]
    (_, _, *prompts), _ = least(terms, measured, short)
    campaigns = read_campaigns("campaigns.yaml", ("fitted",))
    setup = launch(campaigns, group[0], operators, {})
    cost = prepare(setup.config).instances["engine"].cost
    return [
        {
            "prompt tokens": length,
            "predicted ms": round(1e3 * sum(cost.stages(one_prompt(length))), 1),
            "missing ms": round(missing, 1),
        }
        for length, missing in zip(lengths, prompts, strict=True)
    ]


def one_prompt(length: int) -> Work:
    """Return the work of a step that computes one prompt."""
    return Work(length, 0, 1, 1, 0, [(0, length)])


def errors(group: list[Point], predicted: Predicted) -> tuple[np.ndarray, np.ndarray]:
    """Return measured TPOT, and what predictions lack of it."""
    measured = np.array([point.tpot_ms for point in group])
    return measured, measured - np.array([float(predicted[point.id]) for point in group])


def least(
    terms: list[list[float]], measured: np.ndarray, short: np.ndarray
) -> tuple[list[float], np.ndarray]:
    """Return the factors of the terms, and what is left."""
    matrix = np.array(terms, dtype=float)
    factors, *_ = np.linalg.lstsq(matrix / measured[:, None], short / measured, rcond=None)
    return factors.tolist(), short - matrix @ factors


def median(shares: np.ndarray) -> float:
    """Return the median of absolute shares, in percent."""
    return round(100 * float(np.median(np.abs(shares))), 1)


if __name__ == "__main__":
    main()
