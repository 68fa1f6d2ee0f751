"""Flows of requests from prefill to decode groups, over links of pairs or over shared networks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

from jaxinfer.papers.hexgen2.capacity import Carried, GroupRole, nodes_of
from jaxinfer.papers.hexgen2.gpus import Group, Site

# A name of words and numbers, such as ("nic", node, "out").
Link = tuple[object, ...]
# Flows are integers of 32 bits there; the largest capacity becomes this number.
_LARGEST = 10**6
# A smaller share of the total than this counts as 0.
_LEAST = 1e-7


@dataclass(frozen=True)
class PlacedGroup:
    """A group with a role, and the rate that it can serve in this role."""

    group: Group
    role: GroupRole
    carried: Carried

    def layers(self, site: Site) -> list[tuple[int, int, int, int]]:
        """Return, for each stage, its node, number of GPUs, first layer, and end of layers."""
        nodes, found, start = nodes_of(site, self.group), [], 0
        for stage in self.carried.stages:
            found.append((nodes[stage.place], stage.tp, start, start + stage.layers))
            start += stage.layers
        return found


@dataclass(frozen=True)
class Flow:
    """Rates at which prefill groups send requests to decode groups, in requests per second.

    Attributes:
        total: sum over all pairs.
        pairs: rates by numbers of the prefill and of the decode group; pairs without flow are left
            out.
        per_gb_s: additional requests per second for 10^9 more bytes per second of a link; links
            that are not full are left out.
        per_request: additional requests per second for one more request per second that a group (by
            its number) can serve.
    """

    total: float
    pairs: Mapping[tuple[int, int], float]
    per_gb_s: Mapping[Link, float] = field(default_factory=dict)
    per_request: Mapping[int, float] = field(default_factory=dict)


class KVNetwork:
    """Finds the links that the KV of a request uses, and its bytes on each.

    Args:
        layer_bytes: bytes of one layer's KV of a mean prompt.
    """

    def __init__(self, site: Site, layer_bytes: float) -> None:
        self._site, self._layer_bytes = site, layer_bytes
        self._known: dict[tuple[PlacedGroup, PlacedGroup], dict[Link, tuple[float, float]]] = {}

    def lanes(self, source: PlacedGroup, dest: PlacedGroup) -> Mapping[Link, tuple[float, float]]:
        """Return a request's bytes on each link between two groups, and that link's bytes per s.

        As in the simulator, two stages on one node have their own link, over as many pairs of GPUs
        as the smaller one has; links between nodes are shared.
        """
        key = source, dest
        if key in self._known:
            return self._known[key]
        site, found = self._site, dict[Link, tuple[float, float]]()
        for i, (here, few, start, stop) in enumerate(source.layers(site)):
            for j, (there, many, begin, end) in enumerate(dest.layers(site)):
                shared = min(stop, end) - max(start, begin)
                if shared <= 0:
                    continue
                if here == there:
                    gpu = site.gpu_of_type[site.type_of[here]]
                    links: dict[Link, float] = {
                        ("within", i, j): min(few, many) * gpu.link_gb_s * 1e9
                    }
                else:
                    links = {**site.network(here, there)}
                for link, rate in links.items():
                    bytes_before = found.get(link, (0.0, rate))[0]
                    found[link] = bytes_before + shared * self._layer_bytes, rate
        self._known[key] = found
        return found

    def most(self, source: PlacedGroup, dest: PlacedGroup) -> float:
        """Return the requests per second of a pair that has all of its links to itself."""
        lanes = self.lanes(source, dest).values()
        return min((rate / num_bytes for num_bytes, rate in lanes), default=np.inf)


def split(groups: Sequence[PlacedGroup]) -> tuple[list[int], list[int]]:
    """Return the numbers of the prefill groups and of the decode groups with a positive rate."""
    able = [i for i, placed in enumerate(groups) if placed.carried.rate > 0]
    prefill = [i for i in able if groups[i].role == "prefill"]
    return prefill, [i for i in able if groups[i].role == "decode"]


def pair_flow(groups: Sequence[PlacedGroup], network: KVNetwork) -> Flow:
    """Return the largest flow if each pair has its links to itself (section 3.3)."""
    prefill, decode = split(groups)
    if not prefill or not decode:
        return Flow(0.0, {})
    rates = {i: groups[i].carried.rate for i in (*prefill, *decode)}
    scale = _LARGEST / max(rates.values())
    count = len(prefill) + len(decode)
    rows, columns, most = [], [], []

    def edge(here: int, there: int, rate: float) -> None:
        rows.append(here)
        columns.append(there)
        most.append(int(min(rate * scale, _LARGEST)))

    for a, i in enumerate(prefill):
        edge(count, a, rates[i])
        for b, j in enumerate(decode, len(prefill)):
            edge(a, b, min(network.most(groups[i], groups[j]), rates[i], rates[j]))
    for b, j in enumerate(decode, len(prefill)):
        edge(b, count + 1, rates[j])
    graph = csr_array((np.array(most, np.int32), (rows, columns)), shape=(count + 2, count + 2))
    found = maximum_flow(graph, count, count + 1)
    numbers = [*prefill, *decode]
    flows = found.flow.tocoo()
    pairs = {
        (numbers[a], numbers[b]): int(flow) / scale
        for a, b, flow in zip(*flows.coords, flows.data, strict=True)
        if flow > 0 and a < len(prefill) <= b < count
    }
    return Flow(int(found.flow_value) / scale, dict(sorted(pairs.items())))


def shared_flow(groups: Sequence[PlacedGroup], network: KVNetwork) -> Flow:
    """Return the largest flow if pairs share nodes' cards and links, by a linear program."""
    prefill, decode = split(groups)
    pairs = [(i, j) for i in prefill for j in decode]
    if not pairs:
        return Flow(0.0, {})
    names: dict[Link, int] = {
        ("carries", i): number for number, i in enumerate((*prefill, *decode))
    }
    limits = [groups[i].carried.rate for i in (*prefill, *decode)]
    rows, columns, entries, bounds = [], [], [], []
    for column, (i, j) in enumerate(pairs):
        # Not the groups' own rates: the price of a row belongs to the row.
        most = np.inf
        uses: list[tuple[Link, float, float]] = [
            (("carries", i), 1.0, 0.0),
            (("carries", j), 1.0, 0.0),
        ]
        for link, (num_bytes, rate) in network.lanes(groups[i], groups[j]).items():
            if link[0] == "within":
                most = min(most, rate / num_bytes)
            else:
                # In 10^9 bytes, so that the rows are of similar size.
                uses.append((link, num_bytes / 1e9, rate / 1e9))
        for name, amount, limit in uses:
            if name not in names:
                names[name] = len(names)
                limits.append(limit)
            rows.append(names[name])
            columns.append(column)
            entries.append(amount)
        bounds.append((0.0, most))
    matrix = csr_array((entries, (rows, columns)), shape=(len(names), len(pairs)))
    found = linprog(-np.ones(len(pairs)), A_ub=matrix, b_ub=limits, bounds=bounds, method="highs")
    assert found.success, found.message
    total = float(-found.fun)
    prices = dict(zip(names, (-float(each) for each in found.ineqlin.marginals), strict=True))
    of_links = {
        name: price for name, price in prices.items() if name[0] != "carries" and price > _LEAST
    }
    return Flow(
        total,
        {pair: float(x) for pair, x in zip(pairs, found.x, strict=True) if x > _LEAST * total},
        of_links,
        {i: prices["carries", i] for i in (*prefill, *decode) if prices["carries", i] > _LEAST},
    )
