"""Routing by prefix caches, on a trace whose prompts begin alike and on the same lengths alone."""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from jaxinfer.config.run_file import RunFile, as_run_file
from jaxinfer.simulate.run import simulate
from scripts.reproduce.claims import Target, agrees
from scripts.reproduce.reproduction import Work
from scripts.tables import Row

BUDGETS = {"h": 8192, "a": 2048}
GROUPS: Mapping[str, Mapping[str, Any]] = {
    "h": {"kind": "H100-SXM"},
    "a": {"kind": "A10", "devices": 2},
}
# Number of instances of each group.
CLUSTERS: Mapping[str, Mapping[str, int]] = {
    "8 H100": {"h": 8},
    "4 H100 + 8 A10": {"h": 4, "a": 4},
}
ROUND_ROBIN, LEAST, AFFINITY = "round robin", "least_loaded", "session_affinity"
BY_TOKENS, BY_SECONDS = "prefix_aware, tokens", "prefix_aware, seconds"
SYSTEMS: Mapping[str, Mapping[str, Any]] = {
    ROUND_ROBIN: {"name": "least_loaded", "choose": "round_robin"},
    LEAST: {"name": "least_loaded", "load": "tokens"},
    AFFINITY: {"name": "session_affinity"},
    BY_TOKENS: {"name": "prefix_aware", "weight": 16.0},
    BY_SECONDS: {"name": "prefix_aware", "load": "seconds"},
}
LOADS, LOADS_ALONE = (0.6, 0.9), (0.3, 0.6, 0.9, 1.1)
# How much worse a figure without shared prefixes may be than that of ``least_loaded``.
MOST_WORSE = 0.02
# Blocks that a turn must share with the turn before; nearly all prompts share the first one.
_SHARED = 2


class Asked(NamedTuple):
    """A run of a system on a cluster at a rate, in requests per second."""

    cluster: str
    system: str
    load: float
    rate: float


def config(instances: Mapping[str, int], system: Mapping[str, Any], caching: bool) -> RunFile:
    """Return a run file of Llama 3.1 8B on some instances of each group."""
    engine = {
        "page_size": 64,
        "max_num_seqs": 256,
        "max_num_batched_tokens": max(BUDGETS.values()),
        "max_model_len": 131072,
        "enable_prefix_caching": caching,
    }
    parts = {
        name: {"group": name, "replicas": count, "max_num_batched_tokens": BUDGETS[name]}
        for name, count in instances.items()
    }
    return as_run_file(
        {
            "model": "llama-3.1-8b",
            "engine": engine,
            "groups": {n: {**GROUPS[n], "replicas": count} for n, count in instances.items()},
            "instances": parts,
            "system": dict(system),
            "workload": {"synthetic": {"input_len": 1, "output_len": 1, "count": 1}},
        }
    )


def with_sessions(work: Work) -> Work:
    """Name the sessions of a trace that has none: a turn's prompt begins with an earlier one.

    A prompt's last block, which may be short, does not count.
    """
    tree: dict[int, Any] = {}
    # By a prompt's last whole block, the first request of its session.
    ends: dict[int, int] = {}
    found = []
    for number, item in enumerate(work):
        node, session = tree, number
        for depth, name in enumerate((item.hash_ids or ())[:-1], 1):
            node = node.setdefault(name, {})
            if depth >= _SHARED and id(node) in ends:
                session = ends[id(node)]
        ends[id(node)] = session
        found.append(replace(item, session=session))
    return found


def without_prefixes(work: Work) -> Work:
    """Keep only lengths and arrivals: no two prompts share a token."""
    return [replace(item, hash_ids=None) for item in work]


def at_rate(work: Work, rate: float) -> Work:
    """Stretch the trace's arrivals to a mean rate; bursts and order stay."""
    span = max(item.arrival for item in work)
    return [replace(item, arrival=item.arrival * len(work) / rate / span) for item in work]


def capacities(work: Work, pool: ProcessPoolExecutor) -> dict[str, float]:
    """Return requests/s of each cluster: the sum of its instances, each alone without a cache."""
    kinds = list(GROUPS)
    rates = dict(zip(kinds, pool.map(partial(_alone, without_prefixes(work)), kinds), strict=True))
    return {
        name: sum(count * rates[kind] for kind, count in instances.items())
        for name, instances in CLUSTERS.items()
    }


def _alone(work: Work, kind: str) -> float:
    part = [replace(item, arrival=0.0) for item in work[:: max(len(work) // 300, 1)]]
    made = simulate(config({kind: 1}, {"name": "single"}, False), part)
    return made.steady_requests_s or made.requests / made.wall_s


def loads(work: Work, rates: Mapping[str, float], pool: ProcessPoolExecutor) -> list[Row]:
    """Return a row for each cluster, load and system on the trace."""
    return _rows(with_sessions(work), rates, LOADS, SYSTEMS, pool)


def alone(work: Work, rates: Mapping[str, float], pool: ProcessPoolExecutor) -> list[Row]:
    """Return a row for each cluster, load and system where no prompts begin alike."""
    systems = (LEAST, BY_TOKENS, BY_SECONDS)
    return _rows(without_prefixes(work), rates, LOADS_ALONE, systems, pool)


def _rows(
    work: Work,
    rates: Mapping[str, float],
    shares: Sequence[float],
    systems: Iterable[str],
    pool: ProcessPoolExecutor,
) -> list[Row]:
    asked = [
        Asked(cluster, system, share, share * rates[cluster])
        for cluster in CLUSTERS
        for share in shares
        for system in systems
    ]
    return list(pool.map(partial(_served, work), asked))


def _served(work: Work, asked: Asked) -> Row:
    run_file = config(CLUSTERS[asked.cluster], SYSTEMS[asked.system], True)
    made = simulate(run_file, at_rate(work, asked.rate))
    assert made.ttft_p50 is not None
    assert made.ttft_p99 is not None
    return {
        "cluster": asked.cluster,
        "load": asked.load,
        "requests_s": round(asked.rate, 3),
        "system": asked.system,
        "hit_rate": round(made.cached_tokens / made.prompt_tokens, 4),
        "ttft_p50": round(made.ttft_p50, 4),
        "ttft_p99": round(made.ttft_p99, 3),
        "output_tok_s": round(made.output_tok_s, 1),
    }


def claims_of_loads(rows: Sequence[Row]) -> list[Target]:
    """Return claims that compare routing by caches with systems that look at no cache."""
    found = []
    for cluster in CLUSTERS:
        for figure, words, most in (
            ("hit_rate", "share of prompt tokens from caches", True),
            ("ttft_p50", "TTFT p50", False),
            ("ttft_p99", "TTFT p99", False),
        ):
            said, met = [], True
            for load in LOADS:
                here = _by_system(rows, cluster, load)
                ours = float(here[BY_SECONDS][figure])
                others = [float(here[name][figure]) for name in (ROUND_ROBIN, LEAST, AFFINITY)]
                best = max(others) if most else min(others)
                met &= ours >= best if most else ours <= best
                said.append(f"{ours:g} / {best:g}")
            found.append(
                agrees(
                    f"{cluster}: {BY_SECONDS}, {words} by the best of {ROUND_ROBIN}, {LEAST} and "
                    f"{AFFINITY}, at {', '.join(f'{100 * load:g}' for load in LOADS)} % load",
                    ", ".join(said),
                    met,
                    "at least as good at each load",
                )
            )
    return found


def claims_of_alone(rows: Sequence[Row]) -> list[Target]:
    """Return claims that routing by caches costs nothing where there is nothing to share."""
    found = []
    for cluster, system in product(CLUSTERS, (BY_TOKENS, BY_SECONDS)):
        worst, figure, load = max(
            (worse, figure, load)
            for load in LOADS_ALONE
            for figure, worse in _worse(_by_system(rows, cluster, load), system)
        )
        found.append(
            agrees(
                f"{cluster}, no shared prefixes: {system}, largest loss against {LEAST} in "
                "TTFT p50 and p99 and output tokens/s",
                f"{100 * worst:.1f} % ({figure}, {100 * load:g} % load)",
                worst <= MOST_WORSE,
                f"at most {100 * MOST_WORSE:g} % at any load",
            )
        )
    return found


def _by_system(rows: Sequence[Row], cluster: str, load: float) -> dict[str, Row]:
    return {
        row["system"]: row
        for row in rows
        if row["cluster"] == cluster and float(row["load"]) == load
    }


def _worse(here: Mapping[str, Row], system: str) -> Iterable[tuple[str, float]]:
    """Yield by how much each figure of a system is worse than that of ``least_loaded``."""
    for figure in ("ttft_p50", "ttft_p99"):
        yield figure, float(here[system][figure]) / float(here[LEAST][figure]) - 1
    yield (
        "output_tok_s",
        float(here[LEAST]["output_tok_s"]) / float(here[system]["output_tok_s"]) - 1,
    )
