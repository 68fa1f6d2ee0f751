"""Routing by prefix caches on a trace of conversations. No paper has these comparisons."""

from collections.abc import Mapping

from scripts.reproduce.prefixes import runs
from scripts.reproduce.reproduction import Inputs, Part, Reproduction, Work

# Requests of the trace, and of runs without shared prefixes.
TRACE, REQUESTS, ALONE = "mooncake_conversation.jsonl", 1200, 800


def conversations(inputs: Inputs) -> Work:
    """Return the trace's first requests."""
    return inputs.work(TRACE, REQUESTS)


def capacities(inputs: Inputs) -> Part:
    """Requests/s that each cluster's instances serve alone, without prefix caches."""
    found = runs.capacities(conversations(inputs), inputs.pool)
    return Part([{"cluster": name, "requests_s": round(rate, 3)} for name, rate in found.items()])


def rates(inputs: Inputs) -> Mapping[str, float]:
    """Return the table of capacities."""
    return {str(row["cluster"]): float(row["requests_s"]) for row in inputs.rows("capacities")}


def loads(inputs: Inputs) -> Part:
    """Hit rate, TTFT and tokens/s of five systems by load, on two clusters."""
    rows = runs.loads(conversations(inputs), rates(inputs), inputs.pool)
    return Part(rows, runs.claims_of_loads(rows))


def alone(inputs: Inputs) -> Part:
    """The same lengths without shared prefixes, where routing by caches has nothing to gain."""
    rows = runs.alone(conversations(inputs)[:ALONE], rates(inputs), inputs.pool)
    return Part(rows, runs.claims_of_alone(rows))


REPRODUCTION = Reproduction(
    paper="Routing by prefix caches",
    inputs={
        TRACE: "Mooncake's conversation trace: FAST25-release/traces/conversation_trace.jsonl in "
        "https://github.com/kvcache-ai/Mooncake"
    },
    parts={"capacities": capacities, "loads": loads, "alone": alone},
)
