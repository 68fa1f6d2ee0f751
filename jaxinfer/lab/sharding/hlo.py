"""Counts collectives in a compiled module's text; the only place that defines how to count.

Each array counts as one collective, even if the compiler has combined several. XLA for CPUs makes
no reduce-scatter: an all-reduce that is followed by a slice counts as an all-reduce. XLA for TPUs
puts both into one kernel, a computation named ``all-reduce-scatter``, which counts as a
reduce-scatter. It also divides a collective that overlaps with other work into a beginning, steps
and an end with one channel; they count once. Collectives that programs request under ``shard_map``
all have the same channel, and are not such steps. A collective in a loop counts once, too.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable

from jaxinfer.sharding.collectives import Collective, moved

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
# For each kind, the number of arrays, and how much of them each device sends.
Counts = dict[str, tuple[int, float]]

_LINE = re.compile(
    rf" = (\(?.*?) ({'|'.join(KINDS)})(-start)?\("
    r".*?(?:replica_groups=(mesh\[.*?\](?:, device_ids=\(.*?\))? \{.*?\}|\S+)|pairs=)"
)
_CHANNEL = re.compile(r"channel_id=(\d+)")
_ARRAY = re.compile(r"(?:pred|[a-z]+\d*)\[([\d,]*)\]")
_LISTED = re.compile(r"\{\{([\d,]*)\}")
_IOTA = re.compile(r"\[\d+,(\d+)\]<=")
_MESH_AXIS = re.compile(r"'(\w+)'=(\d+)")
_USED_AXIS = re.compile(r"'(\w+)'(?::\(\d+\)(\d+))?")


def counted(found: Iterable[Collective]) -> Counts:
    """Return how many collectives of each kind closed forms have, and the numbers they send."""
    totals: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for each in found:
        totals[each.kind][0] += 1
        totals[each.kind][1] += each.moved
    return {kind: (int(count), numbers) for kind, (count, numbers) in totals.items()}


def counts(hlo: str) -> Counts:
    """Return how many collectives of each kind a compiled module has, and the numbers they send.

    ``dataflow.moved`` gives the share that a ring sends: of the result for an all-gather, and of a
    device's input for other kinds.
    """
    totals: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    channels: set[str] = set()
    scatters = False
    for line in hlo.splitlines():
        if line.endswith("{"):
            scatters = line.startswith("%all-reduce-scatter")
        found, channel = _LINE.search(line), _CHANNEL.search(line)
        if not found or (channel and channel[1] in channels):
            continue
        if channel and "/shard_map/" not in line:
            channels.add(channel[1])
        result, kind, starts, groups = found.groups()
        devices = _devices(groups) if groups else 2
        sizes = _sizes(result, kind, bool(starts), devices)
        if devices > 1:
            kind = "reduce-scatter" if scatters else kind
            totals[kind][0] += len(sizes)
            totals[kind][1] += moved(kind, devices) * sum(sizes)
    return {kind: (int(count), numbers) for kind, (count, numbers) in totals.items()}


def _sizes(result: str, kind: str, starts: bool, devices: int) -> list[int]:
    """Return the size of each moved array, whole, in numbers."""
    sizes = [_numbers(dims) for dims in _ARRAY.findall(result)]
    if starts and kind == "collective-permute":
        return sizes[1:2]
    if starts and kind != "all-reduce":  # Operands come before results.
        sizes = sizes[len(sizes) // 2 :]
    if kind == "reduce-scatter":
        return [size * devices for size in sizes]
    # An all-to-all has one array, with a piece for each device.
    return [sum(sizes)] if kind == "all-to-all" else sizes


def _numbers(dims: str) -> int:
    return math.prod(int(n) for n in dims.split(",") if n)


def _devices(groups: str) -> int:
    """Return the number of devices of one group, from any of the three notations."""
    if listed := _LISTED.match(groups):
        return listed[1].count(",") + 1
    if iota := _IOTA.match(groups):
        return int(iota[1])
    mesh, _, used = groups.rpartition(" {")
    sizes = dict(_MESH_AXIS.findall(mesh))
    return math.prod(int(part or sizes[name]) for name, part in _USED_AXIS.findall(used))
