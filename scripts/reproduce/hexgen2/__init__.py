"""HexGen-2's Tables 3, 4 and 5 by our planner and simulator, beside the paper's.

Most parts take minutes.
"""

from scripts.reproduce.hexgen2 import frontier as rents
from scripts.reproduce.hexgen2 import regimes, tables
from scripts.reproduce.hexgen2 import search as searches
from scripts.reproduce.hexgen2.runs import CLUSTERS, PLAN, Clusters
from scripts.reproduce.reproduction import Inputs, Part, Reproduction, Work

TRACE = "azure_conversation.csv"
BUDGETS = (10, 12.5, 15, 17.5, 20, 22.5, 25, 27.5, 30, 32.5)
SETTINGS = (*(f"heterogeneous_{number}" for number in range(1, 6)), "homogeneous")


def trace(inputs: Inputs) -> Work:
    """The whole trace."""
    return inputs.work(TRACE)


def both(inputs: Inputs) -> tuple[Work, Clusters]:
    """The trace, and the clusters, whose files are kept."""
    folder = inputs.kept / "clusters"
    folder.mkdir(exist_ok=True)
    return inputs.shared(trace), Clusters(folder)


def classes(inputs: Inputs) -> Part:
    """Shares and mean lengths of the trace's classes."""
    return Part(tables.classes(inputs.shared(trace)))


def step_s(inputs: Inputs) -> Part:
    """The calibrated number, and the cell that it is from."""
    return Part(tables.step_seconds(*both(inputs)))


def table4(inputs: Inputs) -> Part:
    """Table 4: OPT-30B on four H100s."""
    return Part(*tables.table_4(*both(inputs)))


def table3(inputs: Inputs) -> Part:
    """Table 3: Llama-2-70B in setting 1."""
    return Part(*tables.table_3(*both(inputs)))


def drawn(inputs: Inputs) -> Part:
    """A picture of both tables."""
    figure = tables.draw_tables(inputs.rows("table3"), inputs.rows("table4"))
    return Part(pictures={"tables": figure})


def whole_runs(inputs: Inputs) -> Part:
    """Both tables with ramp and drain."""
    return Part(tables.whole_runs(*both(inputs)))


def distserve(inputs: Inputs) -> Part:
    """Plans that DistServe may have had for 8 H100s."""
    return Part(tables.distserve(*both(inputs)))


def hexgen(inputs: Inputs) -> Part:
    """HexGen-2 by HexGen, on four H100s."""
    return Part(*tables.hexgen(*both(inputs)))


def latency(inputs: Inputs) -> Part:
    """Online latency, apart and as whole requests."""
    return Part(*tables.latencies(*both(inputs)))


def plans(inputs: Inputs) -> Part:
    """Settings 1 and 5 and 8 H100s, each with our own plan."""
    return Part(regimes.regimes(*both(inputs)))


def ratios(inputs: Inputs) -> Part:
    """Settings 1 and 5 by 8 H100s."""
    rows = inputs.rows("plans")
    found = regimes.ratios(*both(inputs), rows)
    claims = regimes.regime_targets(rows, found)
    return Part(found, claims, {"ratios": regimes.draw_ratios(found)})


def search(inputs: Inputs) -> Part:
    """Methods of search in setting 1."""
    rows, claims = searches.methods(*both(inputs))
    return Part(rows, claims, {"search": searches.draw_methods(rows)})


def sizes(inputs: Inputs) -> Part:
    """Table 5: how long a plan for many GPUs takes."""
    rows, claims = searches.sizes(*both(inputs))
    return Part(rows, claims, {"sizes": searches.draw_sizes(rows)})


def frontier(inputs: Inputs) -> Part:
    """What a budget would rent, and the paper's settings beside that."""
    rented = rents.frontier(str(PLAN), BUDGETS, most=32)
    hardware = [str(CLUSTERS / f"hexgen2_{name}.yaml") for name in SETTINGS]
    rows = rents.together(rented, rents.points(str(PLAN), hardware))
    return Part(rows, pictures={"frontier": rents.draw(rows)})


def real(inputs: Inputs) -> Part:
    """Five plans for real on this machine's CPU, of a profile that plan_cpu.py has read."""
    from scripts.reproduce.hexgen2 import cpu  # It loads JAX.

    folder = inputs.kept / f"runs-{inputs.code()[:12]}"
    folder.mkdir(exist_ok=True)
    return Part(*cpu.real(folder))


REPRODUCTION = Reproduction(
    paper="HexGen-2",
    inputs={TRACE: "Azure's 2023 conversation trace (Azure/AzurePublicDataset)"},
    parts={
        "classes": classes,
        "step_s": step_s,
        "table4": table4,
        "table3": table3,
        "tables": drawn,
        "whole_runs": whole_runs,
        "distserve": distserve,
        "hexgen": hexgen,
        "latency": latency,
        "plans": plans,
        "ratios": ratios,
        "search": search,
        "sizes": sizes,
        "frontier": frontier,
        "real": real,
    },
    timed=("sizes", "real"),
    by_name=("real",),
)
