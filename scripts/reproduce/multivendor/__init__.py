"""The multi-vendor paper on modelled cards, and on groups of this machine's CPU."""

import shutil

from scripts.reproduce.multivendor import figures
from scripts.reproduce.reproduction import Inputs, Part, Reproduction
from scripts.tables import read_csv

CONFORMANCE = "conformance.csv"


def lengths(inputs: Inputs) -> Part:
    """Figure 6: TPOT and TTFT by the lengths of prompts and answers."""
    return Part(claims=figures.lengths_matter(inputs.pool))


def conformance(inputs: Inputs) -> Part:
    """Pairs between which KV crosses, as ``jaxinfer check hand-offs`` has found them."""
    return Part(claims=figures.conforming(read_csv(inputs.path(CONFORMANCE))))


def swept(inputs: Inputs) -> Part:
    """Five ratios for real on this machine's CPU, each run replayed."""
    from scripts.reproduce.multivendor import sweep as runs  # This imports JAX.

    folder = inputs.kept / "sweep"
    shutil.rmtree(folder, ignore_errors=True)
    rows = runs.sweep(folder)
    return Part(rows, runs.swept(rows), {"sweep": runs.draw(rows)})


REPRODUCTION = Reproduction(
    paper="Disaggregation over several vendors' cards",
    inputs={CONFORMANCE: "the table that `jaxinfer check hand-offs --out DIR` writes"},
    parts={
        "steady": figures.steady_states,
        "ratios": figures.ratios,
        "gains": figures.gains,
        "slow_prefill": figures.slow_prefill,
        "lengths": lengths,
        "conformance": conformance,
        "sweep": swept,
    },
    timed=("sweep",),
    by_name=("sweep",),
)
