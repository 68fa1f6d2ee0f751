"""An order for batches that mixes requests that compute much with requests that read much KV."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress, count, pairwise
from operator import ne
from typing import NamedTuple

# Share of all reading by which outputs are ahead, so that prompts do not end before long outputs.
LEAD = 0.1


class Sized(NamedTuple):
    """A request of a batch.

    Attributes:
        units: the prompt's tokens, or names of its blocks.
        prompt_len: number of tokens of the prompt.
        output_len: number of tokens of the output.
    """

    units: Sequence[int]
    prompt_len: int
    output_len: int

    @property
    def reads(self) -> float:
        """Number of KV entries that are read to decode the output."""
        return self.output_len * (self.prompt_len + self.output_len / 2)


@dataclass
class _Node:
    """Requests whose prompts have ``depth`` tokens in common; they compute what is beyond these."""

    depth: float
    compute: float = 0.0
    reads: float = 0.0
    order: list[int] = field(default_factory=list)
    parts: list["_Node"] = field(default_factory=list)

    def join(self) -> "_Node":
        """Take in the parts, the densest first."""
        for part in self.parts:
            part.compute += part.depth - self.depth
            self.compute += part.compute
            self.reads += part.reads
        for part in sorted(self.parts, key=lambda part: part.reads / part.compute):
            self.order += part.order
        return self


def blended(batch: Sequence[Sized]) -> list[int]:
    """Return the places of the requests in the order in which to serve them.

    This is the order of BlendServe (arXiv 2411.16102). Prompts are the leaves of a tree of their
    common beginnings. The parts of each node are sorted by their density: the number of tokens
    that they compute, divided by the number of KV entries that their outputs read. Requests are
    then taken from both ends of the row of leaves, so that those taken so far have the same share
    of all computing and of all reading; reading is ahead by ``LEAD``.
    """
    leaves = _by_density(batch)
    prompts = [batch[number] for number in leaves]
    shared = [0.0, *(_common(a, b) for a, b in pairwise(prompts))]
    computes = [p.prompt_len - s + p.output_len for p, s in zip(prompts, shared, strict=False)]
    reads = [each.reads for each in prompts]
    all_computes, all_reads = sum(computes), max(sum(reads), 1.0)
    low, high, computed, read, found = 0, len(leaves) - 1, 0.0, 0.0, []
    while low <= high:
        if computed / all_computes <= read / all_reads - LEAD:
            place, low = low, low + 1
        else:
            place, high = high, high - 1
        computed, read = computed + computes[place], read + reads[place]
        found.append(leaves[place])
    return found


def _by_density(batch: Sequence[Sized]) -> list[int]:
    """Return the leaves of the tree of prompts, with the densest parts of each node first."""
    leaves = sorted(range(len(batch)), key=lambda number: tuple(batch[number].units))
    depths = [0.0, *(_common(batch[a], batch[b]) for a, b in pairwise(leaves)), 0.0]
    path = [_Node(0.0)]
    for number, (before, after) in zip(leaves, pairwise(depths), strict=False):
        _leave(path, before)
        if after > path[-1].depth:
            path.append(_Node(after))
        item = batch[number]
        leaf = _Node(item.prompt_len, item.output_len, item.reads, [number])
        path[-1].parts.append(leaf)
    _leave(path, 0.0)
    return path[0].join().order


def _leave(path: list[_Node], depth: float) -> None:
    """Leave the nodes of a path that are deeper; its end then has this depth."""
    while path[-1].depth > depth:
        done = path.pop().join()
        if path[-1].depth < depth:
            path.append(_Node(depth))
        path[-1].parts.append(done)


def _common(a: Sized, b: Sized) -> float:
    """Return the number of tokens with which both prompts begin."""
    most = min(len(a.units), len(b.units))
    common = next(compress(count(), map(ne, a.units, b.units)), most)
    if not common:
        return 0.0
    # A last unit may be a block that one of them does not fill.
    return min(common * each.prompt_len / len(each.units) for each in (a, b))
