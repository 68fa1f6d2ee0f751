"""``jaxinfer check hand-offs``: KV handed over between all pairs of unlike instances."""

import string
import sys
from itertools import product
from pathlib import Path

import click
from rich.console import Console

from jaxinfer.commands.common import say, with_model
from jaxinfer.commands.figures import print_json, with_json


@click.command()
@with_model
@click.option(
    "--values",
    multiple=True,
    metavar="NAME=A,B",
    help="Values to try for a setting, e.g. page_size=8,48; may be repeated.",
)
@click.option(
    "--tokens", default=300, show_default=True, type=click.IntRange(min=1), help="Prompt tokens."
)
@click.option(
    "--outputs",
    default=16,
    show_default=True,
    type=click.IntRange(min=1),
    help="Output tokens to compare.",
)
@click.option("--out", help="New folder for conformance.md and conformance.csv.")
@with_json
def hand_offs(
    model: str | None,
    values: tuple[str, ...],
    tokens: int,
    outputs: int,
    out: str | None,
    as_json: bool,
) -> None:
    """Check KV hand-offs between all pairs of differently configured instances.

    The instances ("sides") differ in dtype, KV dtype, page size, kernels, tensor parallelism and
    pipeline stages, chosen so that every pair of values occurs together in at least one of them.
    All of them run on this machine's devices. Without --model, a small model with random weights
    is used. Golden KV entries are sent first: each value encodes where it belongs, so a fault can
    be named.
    """
    from jaxinfer.checkpoints.checkpoint import open_checkpoint
    from jaxinfer.checkpoints.small_model import small_checkpoint
    from jaxinfer.lab.hand_offs.measured import Conformance
    from jaxinfer.lab.hand_offs.sides import covering_sides, with_values
    from jaxinfer.lab.hand_offs.table import (
        as_rich,
        conformance_tables,
        write_conformance,
    )
    from jaxinfer.report.comparison import new_folder
    from jaxinfer.report.progress import LoadProgress
    from jaxinfer.workload.lengths import synthetic_tokens

    chosen = covering_sides(with_values(values))
    names = [*string.ascii_uppercase, *map("".join, product(string.ascii_uppercase, repeat=2))]
    sides = dict(zip(names, chosen, strict=False))
    if out:
        new_folder(Path(out))
    checkpoint = open_checkpoint(model) if model else small_checkpoint()
    prompt = synthetic_tokens(tokens, checkpoint.config.vocab_size, seed=0)
    found = []
    with LoadProgress(True) as bar:
        sought = Conformance(checkpoint, sides, prompt, outputs, bar.update)
        bar.update("pairs", len(sides) ** 2)
        for outcome in sought.outcomes():
            found.append(outcome)
            bar.update("pairs", len(sides) ** 2 - len(found))
    console = Console(width=None if sys.stdout.isatty() else 160)
    if as_json:
        print_json({"sides": sides, "pairs": found})
    for title, cells in conformance_tables(sides, found, outputs).items():
        if cells[1] and not as_json:
            console.print(as_rich(title, cells))
            console.print()
    if out:
        write_conformance(Path(out), sides, found, outputs)
        if not as_json:
            console.print(f"tables: {out}", soft_wrap=True)
    wrong = [
        f"{o.source} to {o.dest}" + (f" ({o.fault})" if o.fault else "")
        for o in found
        if o.verdict == "wrong"
    ]
    if wrong:
        say(f"jaxinfer: KV arrives changed by more than its formats round: {', '.join(wrong)}")
        sys.exit(1)
