"""HexGen-2's first phase (section 3.2): divides GPUs into groups and roles by their links.

Our readings where the paper is silent: recursive bisection by the second eigenvector of the
normalised Laplacian, cut where memory is closest to that side's share of groups; for Kernighan and
Lin, the single best swap at a time; half of the groups prefill.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import combinations

import numpy as np
from scipy.linalg import eigh

from jaxinfer.hardware.catalogue import ITEMSIZE, ModelShape
from jaxinfer.papers.hexgen2.capacity import GroupRole
from jaxinfer.papers.hexgen2.gpus import Group, Site
from jaxinfer.papers.hexgen2.moves import MemberPlan, as_plan

# Number of requests whose KV a replica must hold, to count replicas (Appendix A).
_REQUESTS = 32
# Weight of a smaller squared imbalance of memory relative to a gain of inner weight, as shares.
_BALANCE = 1.0
# Digits of an eigenvector that do not depend on how it was computed; the largest distance of
# eigenvalues that count as equal; and the largest square of an entry that counts as 0.
_DIGITS, _EQUAL = 9, 1e-9


def num_replicas(site: Site, model: ModelShape, tokens: float) -> int:
    """Return how many replicas fit into the memory of all GPUs, with weights and KV of 32 requests.

    Follows Table 1, which has 12 H^2 parameters in a layer, and as many KV heads as heads.

    Args:
        tokens: number of tokens of a request.
    """
    H, layers = model.hidden_size, model.num_hidden_layers
    kv = _REQUESTS * tokens * H * ITEMSIZE
    replica = (12 * H**2 * ITEMSIZE + 2 * kv) * layers + 4 * kv
    return max(round(float(_memory(site).sum()) / replica), 2)


def partition(site: Site, count: int) -> MemberPlan:
    """Return ``count`` groups with roles; there must be at least as many GPUs as groups."""
    weights = _weights(site)
    memory, node_of = _memory(site), _node_of(site)
    parts = _bisect(weights, memory, list(range(len(memory))), count)
    owner = np.empty(len(memory), int)
    for number, part in enumerate(parts):
        owner[part] = number
    _swap(weights, memory, node_of, owner, count)
    groups: list[Group] = [
        tuple(sorted(Counter(node_of[owner == number].tolist()).items())) for number in range(count)
    ]
    between = np.zeros((count, count))
    for a, b in combinations(range(count), 2):
        between[a, b] = between[b, a] = weights[np.ix_(owner == a, owner == b)].sum()
    return as_plan(zip(groups, roles(between), strict=True))


def roles(between: np.ndarray) -> list[GroupRole]:
    """Assign each role to half of the groups, by swaps that put much weight between the roles."""
    count = len(between)
    side = np.array([i % 2 for i in range(count)])
    if count < 3:
        return [_role(s) for s in side]
    while True:
        # For each group, the weight to its own side minus the weight to the other side.
        own = between @ (2 * side - 1) * (2 * side - 1)
        gains = [
            (float(own[a] + own[b] + 2 * between[a, b]), a, b)
            for a in range(count)
            for b in range(count)
            if side[a] == 0 and side[b] == 1
        ]
        gain, a, b = max(gains, key=lambda each: (each[0], -each[1], -each[2]))
        if gain <= 1e-9 * between.sum():
            return [_role(s) for s in side]
        side[a], side[b] = 1, 0


def _role(side: int) -> GroupRole:
    return "decode" if side else "prefill"


def _node_of(site: Site) -> np.ndarray:
    return np.repeat(np.arange(len(site.gpus)), site.gpus)


def _memory(site: Site) -> np.ndarray:
    each = [site.gpu_of_type[type_].memory_gb * 1e9 for type_ in site.type_of]
    return np.repeat(each, site.gpus)


def _weights(site: Site) -> np.ndarray:
    """Return the bytes per second between all GPUs."""
    nodes = range(len(site.gpus))
    between = np.array([[1 / site.hop(a, b)[1] for b in nodes] for a in nodes])
    node_of = _node_of(site)
    weights = between[np.ix_(node_of, node_of)]
    np.fill_diagonal(weights, 0.0)
    return weights


def _bisect(
    weights: np.ndarray, memory: np.ndarray, gpus: Sequence[int], count: int
) -> list[list[int]]:
    if count == 1:
        return [list(gpus)]
    some = np.array(gpus)
    order = some[_order(weights[np.ix_(some, some)])]
    first = count // 2
    filled = np.cumsum(memory[order])
    # Each group of either side gets at least one GPU.
    several = filled[first - 1 : len(gpus) - (count - first)]
    cut = first + int(np.argmin(np.abs(several - filled[-1] * first / count)))
    left, right = order[:cut].tolist(), order[cut:].tolist()
    return [*_bisect(weights, memory, left, first), *_bisect(weights, memory, right, count - first)]


def _order(weights: np.ndarray) -> np.ndarray:
    """Order nodes by the second eigenvector; nodes that are equal there are ordered by number.

    Clusters with equal parts have several such eigenvectors. The one nearest to the first node on
    which they do not vanish is used: any other choice would depend on the machine's LAPACK.
    """
    degree = 1 / np.sqrt(weights.sum(axis=1))
    laplacian = np.eye(len(weights)) - degree[:, None] * weights * degree[None, :]
    values, vectors = eigh(laplacian)
    several = vectors[:, 1:][:, values[1:] - values[1] < _EQUAL]
    first = np.flatnonzero((several**2).sum(axis=1) > _EQUAL)[0]
    nearest = several @ several[first]
    vector = np.round(nearest / np.linalg.norm(nearest) * degree / degree.max(), _DIGITS)
    return np.lexsort((np.arange(len(vector)), vector))


def _swap(
    weights: np.ndarray, memory: np.ndarray, node_of: np.ndarray, owner: np.ndarray, count: int
) -> None:
    """Swap GPUs of two groups, the best pair at a time, until no swap is an improvement."""
    whole, mean = weights.sum() / 2, memory.sum() / count
    for _ in range(len(memory)):
        # For each GPU, its weight to each group.
        to = np.stack([weights[:, owner == number].sum(axis=1) for number in range(count)], axis=1)
        held = np.array([memory[owner == number].sum() for number in range(count)])
        # Equal GPUs of a node and group count as one.
        _, firsts = np.unique(node_of * count + owner, return_index=True)
        best: tuple[float, int, int] = (1e-9, -1, -1)
        for i, j in combinations(sorted(firsts.tolist()), 2):
            a, b = owner[i], owner[j]
            if a == b or node_of[i] == node_of[j]:
                continue
            inner = to[i, b] - to[i, a] + to[j, a] - to[j, b] - 2 * weights[i, j]
            shift = memory[i] - memory[j]
            before = (held[a] - mean) ** 2 + (held[b] - mean) ** 2
            after = (held[a] - shift - mean) ** 2 + (held[b] + shift - mean) ** 2
            gain = float(inner / whole + _BALANCE * (before - after) / mean**2 / count)
            if gain > best[0]:
                best = gain, i, j
        if best[1] < 0:
            return
        owner[best[1]], owner[best[2]] = owner[best[2]], owner[best[1]]
