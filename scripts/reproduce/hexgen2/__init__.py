"""HexGen-2's Tables 3, 4 and 5 by our planner and simulator, compared with the paper's.

Most parts take minutes.
"""

from scripts.reproduce.hexgen2 import frontier as rents
from scripts.reproduce.hexgen2 import regimes, search, tables
from scripts.reproduce.hexgen2.runs import CLUSTERS, PLAN, TRACE, both
from scripts.reproduce.reproduction import CONVERSATIONS, Inputs, Part, Reproduction

BUDGETS = (10, 12.5, 15, 17.5, 20, 22.5, 25, 27.5, 30, 32.5)
SETTINGS = (*(f"heterogeneous_{number}" for number in range(1, 6)), "homogeneous")


def drawn(inputs: Inputs) -> Part:
    """A picture of both tables."""
    figure = tables.draw_tables(inputs.rows("table3"), inputs.rows("table4"))
    return Part(pictures={"tables": figure})


def ratios(inputs: Inputs) -> Part:
    """Settings 1 and 5 relative to 8 H100s."""
    rows = inputs.rows("plans")
    found = regimes.ratios(*both(inputs), rows)
    claims = regimes.regime_targets(rows, found)
    return Part(found, claims, {"ratios": regimes.draw_ratios(found)})


def rents_and_settings(inputs: Inputs) -> Part:
    """GPUs that a budget would rent, compared with the paper's settings."""
    rented = rents.frontier(str(PLAN), BUDGETS, most=32)
    hardware = [str(CLUSTERS / f"hexgen2_{name}.yaml") for name in SETTINGS]
    rows = rents.together(rented, rents.points(str(PLAN), hardware))
    return Part(rows, pictures={"frontier": rents.draw(rows)})


def real(inputs: Inputs) -> Part:
    """Five plans for real on this machine's CPU, from a profile that plan_cpu.py has read."""
    from scripts.reproduce.hexgen2 import cpu  # This imports JAX.

    folder = inputs.kept / f"runs-{inputs.code()[:12]}"
    folder.mkdir(exist_ok=True)
    return Part(*cpu.real(folder))


REPRODUCTION = Reproduction(
    paper="HexGen-2",
    inputs={TRACE: CONVERSATIONS},
    parts={
        "classes": tables.classes,
        "step_s": tables.step_seconds,
        "table4": tables.table_4,
        "table3": tables.table_3,
        "tables": drawn,
        "whole_runs": tables.whole_runs,
        "distserve": tables.distserve,
        "hexgen": tables.hexgen,
        "latency": tables.latencies,
        "plans": regimes.regimes,
        "ratios": ratios,
        "search": search.methods,
        "sizes": search.sizes,
        "frontier": rents_and_settings,
        "real": real,
    },
    timed=("sizes", "real"),
    by_name=("real",),
)
