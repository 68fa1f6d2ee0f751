"""The multi-vendor paper on modelled cards, and on groups of this machine's CPU."""

import shutil

from scripts.reproduce.multivendor import figures
from scripts.reproduce.reproduction import Inputs, Part, Reproduction
from scripts.tables import read_csv

CONFORMANCE = "conformance.csv"


def steady(inputs: Inputs) -> Part:
    """The closed form of TPOT beside simulations of 2,500 requests."""
    return Part(*figures.steady_states(inputs.pool))


def ratios(inputs: Inputs) -> Part:
    """Figure 7: prefill to decode instances, 256 + 256 tokens at 2 requests per second."""
    rows, claims = figures.ratios(inputs.pool)
    return Part(rows, claims, {"ratios": figures.draw(rows)})


def gains(inputs: Inputs) -> Part:
    """Figures 9 and 10: one card against two, and two against two."""
    return Part(*figures.gains(inputs.pool))


def slow_prefill(inputs: Inputs) -> Part:
    """Figure 8: TTFT over the prefill card's share of its peak."""
    return Part(*figures.slow_prefill(inputs.pool))


def lengths(inputs: Inputs) -> Part:
    """Figure 6: TPOT and TTFT by the lengths of prompts and answers."""
    return Part(claims=figures.lengths_matter(inputs.pool))


def conformance(inputs: Inputs) -> Part:
    """Pairs between which KV crosses, as ``jaxinfer conformance`` has found them."""
    return Part(claims=figures.conforming(read_csv(inputs.path(CONFORMANCE))))


def sweep(inputs: Inputs) -> Part:
    """Five ratios for real on this machine's CPU, each run replayed."""
    from scripts.reproduce.multivendor import sweep as runs  # It loads JAX.

    folder = inputs.kept / "sweep"
    shutil.rmtree(folder, ignore_errors=True)
    rows = runs.sweep(folder)
    return Part(rows, runs.swept(rows), {"sweep": runs.draw(rows)})


REPRODUCTION = Reproduction(
    paper="Disaggregation over several vendors' cards",
    inputs={CONFORMANCE: "the table that `jaxinfer conformance --out DIR` writes"},
    parts={
        "steady": steady,
        "ratios": ratios,
        "gains": gains,
        "slow_prefill": slow_prefill,
        "lengths": lengths,
        "conformance": conformance,
        "sweep": sweep,
    },
    timed=("sweep",),
    by_name=("sweep",),
)
