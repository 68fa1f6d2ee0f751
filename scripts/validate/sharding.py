"""Compare collectives of compiled layers with closed forms, by layout, mesh, model and phase.

    python -m scripts.validate.sharding table.csv

The table has a row for each case. The program exits with 1 if one differs. It takes four minutes on
two cores.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

import click

from jaxinfer.hardware.catalogue import ModelShape, find_gpu, find_model
from jaxinfer.lab.sharding.cache import FOLDER
from jaxinfer.lab.sharding.compiling import PHASES
from jaxinfer.lab.sharding.hlo import KINDS, Counts
from jaxinfer.lab.sharding.study import LayoutFinding, LayoutQuestion, study
from jaxinfer.lab.sharding.targets import CompileTarget
from jaxinfer.models.layouts import LAYOUTS
from jaxinfer.sharding.links import links_of
from scripts.tables import Row, write_csv

MESHES = ("1x8", "2x4", "4x4", "8x8")
MODELS = ("llama-3-70b", "opt-66b", "qwen3-30b-a3b")
TOKENS, SEQUENCES, CONTEXT = 2048, 64, 2048


def question(
    model: ModelShape, mesh: str, tokens: int, sequences: int, context: int
) -> LayoutQuestion:
    """Return the question for XLA for CPUs."""
    x, y = map(int, mesh.split("x"))
    sizes, card = {"x": x, "y": y}, find_gpu("H100-SXM")
    return LayoutQuestion(
        model,
        sizes,
        card,
        CompileTarget("cpu", (x * y,)),
        PHASES,
        tokens,
        sequences,
        context,
        "bfloat16",
        links_of(card, sizes),
    )


def rows(meshes: Sequence[str], models: Mapping[str, ModelShape], cache: Path) -> Iterator[Row]:
    """Yield a row for each layout, phase, mesh and model."""
    for mesh, (name, model) in product(meshes, models.items()):
        asked = question(model, mesh, TOKENS, SEQUENCES, CONTEXT)
        for found in study(asked, LAYOUTS, cache)[0]:
            yield {"mesh": mesh, "model": name, **row(found)}


def row(found: LayoutFinding) -> Row:
    """Return the counts and sizes of both, by kind of collective."""
    cells: Row = {"layout": found.layout, "phase": found.phase}
    for kind in KINDS:
        for source, counts in (("compiled", found.compiled), ("closed", found.closed)):
            cells |= _cells(f"{source}_{kind.replace('-', '_')}", counts, kind)
    return {**cells, "equal": found.equal, "notes": "; ".join(found.notes)}


def _cells(name: str, counts: Counts, kind: str) -> Row:
    count, numbers = counts.get(kind, (0, 0.0))
    return {name: count, f"{name}_numbers": round(numbers)}


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--mesh", "meshes", multiple=True, default=MESHES, show_default=True)
@click.option("--model", "models", multiple=True, default=MODELS, show_default=True)
def main(out: Path, meshes: tuple[str, ...], models: tuple[str, ...]) -> None:
    """Write the table, and print how many rows are equal."""
    found = list(rows(meshes, {name: find_model(name) for name in models}, FOLDER.expanduser()))
    write_csv(out, found)
    equal = sum(each["equal"] for each in found)
    print(f"{equal} of {len(found)} are equal")
    sys.exit(equal < len(found))


if __name__ == "__main__":
    main()
