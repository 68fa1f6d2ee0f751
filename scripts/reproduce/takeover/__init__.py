"""Takeover, our own system, compared with others and with the bound.

No paper has these figures.
"""

from collections.abc import Callable
from dataclasses import replace

from scripts.reproduce.reproduction import Inputs, Part, Reproduction, Work
from scripts.reproduce.takeover import beside, cost, lengths, loads, maps
from scripts.reproduce.takeover.cases import OTHERS

SEED = (0,)
PAIRS = {"a100_a10": "A100+A10", "a100_a30": "A100+A30", "h100_l4": "H100+L4"}


WIDE = {"a100_4_a10": "A100+4 A10", "four_kinds": "H100+A100+L40S+L4"}


def _map(cluster: str) -> Callable[[Inputs], Part]:
    def made(inputs: Inputs) -> Part:
        rows = maps.map_of(cluster, SEED, inputs.pool)
        return Part(rows, maps.claims(cluster, rows))

    made.__doc__ = f"Shares of the bound on {cluster}."
    return made


def others(inputs: Inputs) -> Part:
    """Shares of the bound on 32 other clusters; two of them were used to choose a rule."""
    rows = [
        row | {"cell": f"{cluster}, {row['cell']}"}
        for cluster in OTHERS
        for row in maps.map_of(cluster, SEED, inputs.pool)
    ]
    return Part(rows, maps.claims(f"{len(OTHERS)} other clusters", rows))


def picture(inputs: Inputs) -> Part:
    """A picture of the maps."""
    made = {pair: inputs.rows(part) for part, pair in PAIRS.items()}
    return Part(pictures={"map": maps.draw(made)})


def parts(inputs: Inputs) -> Part:
    """The gain of each part of takeover."""
    return Part(beside.parts(inputs.pool))


def _traces(inputs: Inputs) -> dict[str, Work]:
    return {file: inputs.work(file) for file in lengths.TRACES}


def other_lengths(inputs: Inputs) -> Part:
    """Shares of the bound for lognormal lengths and those of traces, on four pairs."""
    traces = inputs.shared(_traces)
    rows = [
        row | {"cell": f"{cluster}, {row['cell']}"}
        for cluster in lengths.SPREAD
        for row in maps.map_of(cluster, SEED, inputs.pool, lengths.drawn(cluster, traces))
    ]
    return Part(
        rows, maps.claims(f"lengths that are not uniform, {len(lengths.SPREAD)} pairs", rows)
    )


def latency(inputs: Inputs) -> Part:
    """Latencies at 80 % of Cronus' rate: even, random and bursty arrivals, uniform lengths."""
    rows = loads.uniform(inputs.pool)
    return Part(rows, loads.claims("A100+A10", rows))


def latency_lengths(inputs: Inputs) -> Part:
    """The same for lognormal lengths and those of traces, on two clusters."""
    rows = loads.of_traces(inputs.shared(_traces), inputs.pool)
    return Part(rows, loads.claims("lengths that are not uniform", rows))


def decided(inputs: Inputs) -> Part:
    """Microseconds of takeover's decisions and of its simulation, per request."""
    rows = cost.rows()
    return Part(rows, cost.claims(rows))


def table_2(inputs: Inputs) -> Part:
    """Cronus' Table 2, with takeover."""
    work = [replace(item, arrival=0.0) for item in inputs.work(beside.TRACE)[: beside.REQUESTS]]
    rows = beside.table_2(work, inputs.pool)
    return Part(rows, beside.table_2_claims(rows))


REPRODUCTION = Reproduction(
    paper="Takeover",
    inputs={file: what for file, (_, what) in lengths.TRACES.items()},
    parts={
        **{part: _map(cluster) for part, cluster in (PAIRS | WIDE).items()},
        "others": others,
        "lengths": other_lengths,
        "map": picture,
        "parts": parts,
        "latency": latency,
        "latency_lengths": latency_lengths,
        "cost": decided,
        "table2": table_2,
    },
    timed=("cost",),
    by_name=["others"],
)
