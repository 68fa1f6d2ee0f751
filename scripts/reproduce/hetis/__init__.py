"""Hetis on the modelled cluster, and on this machine's CPU.

Of the paper's text all multipliers but two are lost (2.25 times the throughput, 1.49 times lower
latency, both from its abstract), so that most claims are of order and sign. Lengths are ShareGPT's
and arXiv's, drawn from published quantiles. Nothing is calibrated.
"""

from scripts.reproduce.hetis import capacities as sums
from scripts.reproduce.hetis import halves as turns
from scripts.reproduce.hetis import measured as public
from scripts.reproduce.hetis import offload as leaving
from scripts.reproduce.hetis import pictures, runs
from scripts.reproduce.hetis.dispatch import compared
from scripts.reproduce.hetis.placements import placements
from scripts.reproduce.reproduction import Inputs, Part, Reproduction


def primaries(inputs: Inputs) -> Part:
    """Which GPUs keep layers, by Table 1, and how long the search takes."""
    return Part(*placements())


def capacities(inputs: Inputs) -> Part:
    """Tokens of KV that fit, beside sums of memories."""
    rows, claims = sums.capacities()
    return Part(rows, claims, {"capacities": pictures.draw_capacities(rows)})


def idle_memory(inputs: Inputs) -> Part:
    """Figure 1b: memory that lies idle on the A100."""
    return Part(*sums.idle_memory())


def offload(inputs: Inputs) -> Part:
    """Tokens in flight from which heads leave the devices with layers."""
    found = leaving.courses()
    drawn = {"offload": pictures.draw_offload(found), "heads": pictures.draw_burst()}
    return Part(*leaving.offload(found), drawn)


def dispatch(inputs: Inputs) -> Part:
    """Greedy dispatch beside a linear program."""
    return Part(*compared())


def systems(inputs: Inputs) -> Part:
    """70B on all of the cluster: Hetis, its primaries alone, pipelines."""
    return Part(*runs.systems())


def smaller_models(inputs: Inputs) -> Part:
    """13B and OPT-30B, whose layers need the A100s alone."""
    return Part(*runs.smaller_models())


def redispatch(inputs: Inputs) -> Part:
    """Figures 15 and 16: moves against preemption, and Theta."""
    return Part(*runs.redispatch())


def wrong(inputs: Inputs) -> Part:
    """What wrong coefficients of equations 3 and 4 cost."""
    return Part(*runs.wrong_figures())


def halves(inputs: Inputs) -> Part:
    """The shortest steps, whole and as halves in turn."""
    return Part(*turns.halves(), {"halves": turns.draw_halves()})


def half_thresholds(inputs: Inputs) -> Part:
    """From how many tokens heads leave, whole and as halves."""
    return Part(*turns.thresholds())


def half_runs(inputs: Inputs) -> Part:
    """Whole runs without halves, and with those that take less time."""
    return Part(*turns.half_runs())


def measured(inputs: Inputs) -> Part:
    """Equations 3 and 4 on times that were measured on GPUs."""
    return Part(*public.measured(inputs.path("aiconfigurator"), inputs.path("vidur")))


def real(inputs: Inputs) -> Part:
    """Five runs of the engine on this machine's CPU."""
    from scripts.reproduce.hetis import cpu  # It loads JAX.

    rows, heads, claims = cpu.real()
    return Part(rows, claims, {"real_heads": cpu.draw_real(heads)}, {"real_heads": heads})


REPRODUCTION = Reproduction(
    paper="Hetis",
    inputs={
        "aiconfigurator": "folder with *_generation_attention_perf.csv.gz (of NVIDIA)",
        "vidur": "folder with network/*/send_recv.csv.gz (microsoft/vidur's profiles)",
    },
    parts={
        "primaries": primaries,
        "capacities": capacities,
        "idle_memory": idle_memory,
        "offload": offload,
        "dispatch": dispatch,
        "systems": systems,
        "smaller_models": smaller_models,
        "redispatch": redispatch,
        "wrong": wrong,
        "halves": halves,
        "half_thresholds": half_thresholds,
        "half_runs": half_runs,
        "measured": measured,
        "real": real,
    },
    timed=("primaries", "dispatch", "real"),
    by_name=("real",),
)
