"""Rules of data flow: the collectives that a layout's tables require.

A product uses its operands in place. Three rules decide what moves:

1. Operands move, results do not. An axis of tokens that the result's table lacks is gathered from
   the operand. An axis that the table wants, and that cuts a summed axis, is exchanged.
2. Sums over a cut axis are partial. They are reduce-scattered if the result's table wants that
   axis, otherwise reduced everywhere.
3. Cutting data that a device has whole costs nothing.

This file needs no JAX.
"""

import math
from dataclasses import dataclass

from jaxinfer.hardware.catalogue import ModelShape
from jaxinfer.models.layouts import (
    ACTIVATIONS,
    Layout,
    Places,
    letters_of,
    named,
    table_in_use,
    table_of,
)
from jaxinfer.sharding.collectives import Collective
from jaxinfer.sharding.shapes import Sizes

Cuts = dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class ProductShare:
    """A device's part of a matrix product.

    Attributes:
        flops: FLOPs; a multiplication and an addition count as two.
        operand: activation that it reads; products with the same operand are one kernel.
        rows: number of tokens.
        weights: how many numbers of the weight it reads.
        reads: how many numbers of activations it reads.
        writes: how many numbers of activations it writes.
        experts: whether it belongs to a mixture's experts; all of them see all tokens here.
    """

    what: str
    operand: str
    rows: float
    flops: float
    weights: float
    reads: float
    writes: float
    experts: bool


@dataclass(frozen=True)
class Activation:
    """An activation and the axes of the mesh that cut each of its own.

    Attributes:
        partial: axes over which it must still be summed, for each summed logical axis.
    """

    what: str
    letters: str
    cuts: Cuts
    partial: tuple[tuple[str, ...], ...] = ()


class FlowRules:
    """Applies the rules on one mesh, and lists collectives and products."""

    def __init__(self, model: ModelShape, layout: Layout, mesh: Sizes, tokens: float) -> None:
        self.layout, self.mesh, self.axes = layout, mesh, list(mesh)
        self.sizes: dict[str, float] = {
            "T": tokens,
            "S": tokens,
            "D": model.hidden_size,
            "N": model.num_attention_heads,
            "K": model.num_key_value_heads,
            "H": model.head_size,
            "F": model.intermediate_size,
            "E": model.num_experts,
            "V": model.vocab_size,
        }
        self.collectives: list[Collective] = []
        self.products: list[ProductShare] = []
        self._gathered: set[tuple[str, str, str]] = set()

    def cuts(self, letters: str, table: Places) -> Cuts:
        """Return a table's places by letter; axes with one device cut nothing."""
        found = {
            letter: tuple(a for a in named(table.get(letter, ()), self.axes) if self.mesh[a] > 1)
            for letter in letters
        }
        return {letter: axes for letter, axes in found.items() if axes}

    def named_cuts(self, *names: str) -> Cuts | None:
        """Return the cuts of the first of these activations that the layout names;
        otherwise None.
        """
        for name in names:
            if name in self.layout.activations:
                return self.cuts(ACTIVATIONS[name], self.layout.activations[name])
        return None

    def ways(self, axes: tuple[str, ...]) -> int:
        """Return the number of pieces into which these axes cut."""
        return math.prod(self.mesh[axis] for axis in axes)

    def local(self, letters: str, cuts: Cuts) -> float:
        """Return how many numbers each device has."""
        return math.prod(self.sizes[each] / self.ways(cuts.get(each, ())) for each in letters)

    def record(
        self,
        kind: str,
        axes: tuple[str, ...],
        letters: str,
        cuts: Cuts,
        what: str,
        asked: bool = False,
    ) -> None:
        """Record a collective over these axes, if there are any, of an array with these cuts."""
        self.add(kind, axes, self.local(letters, cuts), what, letters, asked)

    def add(
        self,
        kind: str,
        axes: tuple[str, ...],
        numbers: float,
        what: str,
        letters: str,
        asked: bool = False,
    ) -> None:
        """Add a collective of ``numbers`` numbers over these axes, if there are any."""
        if axes:
            ways = self.ways(axes)
            self.collectives.append(Collective(kind, axes, ways, numbers, what, letters, asked))

    def move(self, x: Activation, to: Cuts) -> Activation:
        """Sum a partial array, then exchange, gather and cut it; earlier gathers are reused."""
        wanted = {axis for axes in to.values() for axis in axes}
        cuts = dict(x.cuts)
        for summed in x.partial:
            scattered = tuple(axis for axis in summed if axis in wanted)
            reduced = tuple(axis for axis in summed if axis not in wanted)
            self.record("reduce-scatter", scattered, x.letters, cuts, x.what)
            for letter, axes in to.items() if scattered else ():
                here = tuple(axis for axis in axes if axis in scattered)
                cuts[letter] = (*cuts.get(letter, ()), *here)
            self.record("all-reduce", reduced, x.letters, cuts, x.what)
        key = (x.what, str(sorted(cuts.items())), str(sorted(to.items())))
        if key not in self._gathered:
            self._gathered.add(key)
            self._exchange_and_gather(x, cuts, to)
        return Activation(x.what, x.letters, to)

    def _exchange_and_gather(self, x: Activation, cuts: Cuts, to: Cuts) -> None:
        added = {a for k, axes in to.items() for a in axes if a not in cuts.get(k, ())}
        gone = {k: [a for a in axes if a not in to.get(k, ())] for k, axes in cuts.items()}
        for axes in gone.values():
            exchanged = tuple(axis for axis in axes if axis in added)
            self.record("all-to-all", exchanged, x.letters, cuts, x.what)
        left = {k: tuple(a for a in axes if a not in gone[k]) for k, axes in cuts.items()}
        gathered = tuple(a for axes in gone.values() for a in axes if a not in added)
        moving = {a for axes in gone.values() for a in axes}
        exchanged_to = {
            k: (*left.get(k, ()), *(a for a in to.get(k, ()) if a in moving)) for k in x.letters
        }
        self.record("all-gather", gathered, x.letters, exchanged_to, x.what)

    def normed(self, name: str, residual: Cuts, gated: bool) -> Activation:
        """Return the residual stream's norm where the layout wants it.

        Means over cut rows are sums.
        """
        over = residual.get("D", ())
        for mean in ("mean square",) if gated else ("mean", "mean square"):
            self.record("all-reduce", over, "T", residual, f"{mean} of {name}")
        return self.move(
            Activation(name, "TD", residual), otherwise(self.named_cuts(name), residual)
        )

    def used(self, path: str) -> Cuts:
        """Return the cuts of a weight as it is multiplied."""
        return self.cuts(letters_of(path), table_in_use(path, self.layout, self.axes))

    def gather_weight(self, path: str) -> Cuts:
        """Return the cuts of a weight as it is multiplied, and record its gathering."""
        letters, used = letters_of(path), self.used(path)
        stored = self.cuts(letters, table_of(path, self.layout))
        gone = tuple(a for k, axes in stored.items() for a in axes if a not in used.get(k, ()))
        self.record("all-gather", gone, letters, used, letters_name(path))
        return used

    def product(self, x: Activation, path: str, out: str, what: str, to: Cuts | None) -> Activation:
        """Multiply x by a weight; ``out`` has the result's letters, ``to`` its cuts if it has a
        name.
        """
        letters, used = letters_of(path), self.gather_weight(path)
        summed = [k for k in x.letters if k not in out]
        cuts = dict(x.cuts)
        of_weight = {a for axes in used.values() for a in axes}
        target = to or {}
        kept = tuple(
            a
            for a in cuts.get("T", ())
            if (to is None or a in target.get("T", ())) and a not in of_weight
        )
        came: tuple[str, ...] = ()
        for k in summed:
            moving = tuple(
                a for a in cuts.get(k, ()) if a in target.get("T", ()) and a not in used.get(k, ())
            )
            came += moving
            cuts[k] = tuple(a for a in cuts.get(k, ()) if a not in moving)
        cuts["T"] = tuple(a for a in target.get("T", ()) if a in came) + kept
        x = self.move(x, {k: axes for k, axes in cuts.items() if axes})
        partial = tuple(
            tuple(dict.fromkeys((*x.cuts.get(k, ()), *used.get(k, ())))) for k in summed
        )
        sums = {axis for axes in partial for axis in axes}
        found: Cuts = {"T": x.cuts.get("T", ())}
        for k in out:
            if k in letters:
                place = used.get(k, ())
                # Compilers cut a partial sum when they add it up.
                wanted = () if sums else target.get(k, ())
                found[k] = (*place, *(a for a in wanted if a not in (*place, *found["T"])))
        found = {k: axes for k, axes in found.items() if axes}
        self._count(x, path, out, found, sums, summed)
        return Activation(what, out, found, partial)

    def _count(
        self,
        x: Activation,
        path: str,
        out: str,
        found: Cuts,
        sums: set[str],
        summed: list[str],
    ) -> None:
        rows, letters = self.local("T", found), letters_of(path)
        used = self.used(path)
        inner = 1.0
        for k in summed:
            cut = {*x.cuts.get(k, ()), *used.get(k, ())} & sums
            inner *= self.sizes[k] / self.ways(tuple(cut))
        outer = self.local("".join(k for k in letters if k in out), found)
        experts = {*"EF"} <= {*letters}
        # Each expert reads and writes the rows that it receives; a router's columns read the same.
        once = f"{x.letters}E" if experts else x.letters
        writers = self.local("E", used) if experts and "E" in summed else 1.0
        shared = self.local("".join(k for k in letters if k in out and k in once), found)
        self.products.append(
            ProductShare(
                letters_name(path),
                x.what,
                rows,
                2 * rows * inner * outer,
                inner * outer,
                rows * shared * inner,
                rows * outer * writers,
                experts,
            )
        )


def letters_name(path: str) -> str:
    """Return a parameter's own name."""
    return path.rpartition(".")[2]


def otherwise(cuts: Cuts | None, other: Cuts) -> Cuts:
    """Return the cuts if a layout has any, otherwise the others."""
    return other if cuts is None else cuts
