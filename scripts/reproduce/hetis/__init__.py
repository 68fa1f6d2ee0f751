"""Hetis on the modelled cluster, and on this machine's CPU.

Our copy of the paper lacks all multipliers except two of its abstract (2.25 times the throughput,
1.49 times lower latency). Most claims are therefore about order and sign. Lengths are ShareGPT's
and arXiv's, drawn from published quantiles. Nothing is calibrated.
"""

from scripts.reproduce.hetis import capacities, halves, measured, pictures, placements, runs
from scripts.reproduce.hetis import offload as leaving
from scripts.reproduce.hetis.dispatch import compared
from scripts.reproduce.reproduction import (
    AICONFIGURATOR,
    VIDUR_PROFILES,
    Inputs,
    Part,
    Reproduction,
)


def leaving_heads(inputs: Inputs) -> Part:
    """Tokens in flight from which heads leave the devices with layers."""
    found = leaving.courses()
    drawn = {"offload": pictures.draw_offload(found), "heads": pictures.draw_burst()}
    return Part(*leaving.offload(found), drawn)


def real(inputs: Inputs) -> Part:
    """Five runs of the engine on this machine's CPU."""
    from scripts.reproduce.hetis import cpu  # This imports JAX.

    rows, heads, claims = cpu.real()
    return Part(rows, claims, {"real_heads": cpu.draw_real(heads)}, {"real_heads": heads})


REPRODUCTION = Reproduction(
    paper="Hetis",
    inputs={
        "aiconfigurator": f"{AICONFIGURATOR}: generation_attention_perf of each",
        "vidur": VIDUR_PROFILES,
    },
    parts={
        "primaries": placements.placements,
        "capacities": capacities.capacities,
        "idle_memory": capacities.idle_memory,
        "offload": leaving_heads,
        "dispatch": compared,
        "systems": runs.systems,
        "smaller_models": runs.smaller_models,
        "redispatch": runs.redispatch,
        "wrong": runs.wrong_figures,
        "halves": halves.halves,
        "half_thresholds": halves.thresholds,
        "half_runs": halves.half_runs,
        "measured": measured.measured,
        "real": real,
    },
    timed=("primaries", "dispatch", "real"),
    by_name=("real",),
)
