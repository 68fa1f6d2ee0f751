"""Finds the fastest layout among all assignments of logical axes to mesh axes.

An assignment says which mesh axes cut rows of weights (D), heads (N and K together), columns (F),
experts (E) and tokens (T). The rest follows: tokens stay cut unless heads or columns need the axis,
weights are gathered over axes that cut both rows and tokens, and the residual stream is cut by rows
wherever weights are and tokens are not. Layouts whose KV is cut by sequences or by tokens are tried
unchanged.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import combinations, product

from jaxinfer.errors import JaxinferError
from jaxinfer.hardware.catalogue import Gpu, ModelShape
from jaxinfer.models.layouts import PRICED, Layout, Places, Rule, in_use, letters_of
from jaxinfer.sharding.costs import LayoutCosts, LayoutStepCost, at_peaks
from jaxinfer.sharding.links import Link
from jaxinfer.sharding.shapes import Sizes, layer_parameters

Place = tuple[str, ...]


@dataclass(frozen=True)
class AxisAssignment:
    """The mesh axes that cut each logical axis, in the mesh's order."""

    rows: Place = ()
    heads: Place = ()
    columns: Place = ()
    experts: Place = ()
    tokens: Place = ()

    def __str__(self) -> str:
        letters = {"rows": "D", "heads": "N", "columns": "F", "experts": "E", "tokens": "T"}
        said = [
            f"{letters[each.name]}: {'+'.join(getattr(self, each.name))}"
            for each in fields(self)
            if getattr(self, each.name)
        ]
        return ", ".join(said) or "whole"

    def layout(self, axes: tuple[str, ...]) -> Layout:
        """Return the layout that follows from the assignment, on a mesh with these axes."""

        def table(**places: Place) -> Places:
            return {letter: place for letter, place in places.items() if place}

        def left(place: Place, *others: Place) -> Place:
            return tuple(axis for axis in place if not any(axis in other for other in others))

        # The first gathered axis is the innermost, so that pieces are neighbours.
        rows = left(self.rows, self.tokens)
        gathered = left(self.rows, rows)
        by_heads = left(self.tokens, self.heads)
        # Tokens that are cut over all axes of the experts are sent to their experts.
        whole = () if {*self.experts} <= {*self.tokens} else self.experts
        by_columns = left(self.tokens, self.columns, whole)
        stream = (*rows, *left(axes, self.tokens, rows)) if rows else ()
        stored = (*rows, *gathered)
        matrix = table(D=stored, N=self.heads, K=self.heads, F=self.columns, E=self.experts)
        # Partial sums over rows are scattered over the heads and columns that they belong to.
        # Tokens whose weights are gathered are exchanged for heads.
        heads = (*self.heads, *rows, *gathered)
        apart = left(by_heads, gathered)
        kv = table(K=heads)
        router = (Rule("*router_DE", table(D=stored)),) if self.experts else ()
        return Layout(
            (Rule("*norm.*", {}), *router, Rule("layers.*", matrix)),
            {
                "residual": table(T=self.tokens, D=stream),
                "attention_inputs": table(T=by_heads, D=rows),
                "queries": table(T=by_heads, N=(*self.heads, *rows)),
                "new_kv": table(T=by_heads, K=(*self.heads, *rows)),
                "heads": table(T=apart, N=heads),
                "kv": kv,
                "attention_outputs": table(T=by_heads, N=self.heads),
                "ffn_inputs": table(T=by_columns, D=rows),
                "ffn": table(T=by_columns, F=(*self.columns, *rows)),
                "ffn_outputs": table(T=by_columns, F=self.columns),
                "experts": table(T=left(by_columns, self.experts), E=self.experts, F=self.columns),
            },
            kv,
            gathered,
        )


@dataclass(frozen=True)
class PricedLayout:
    """One of the layouts in ``PRICED``, which divide KV in a way that no assignment can."""

    name: str

    def __str__(self) -> str:
        return self.name

    def layout(self, axes: tuple[str, ...]) -> Layout:
        """Return the layout on a mesh with these axes."""
        return in_use(PRICED[self.name], axes)


@dataclass(frozen=True)
class Found:
    """An assignment, and the cost of its step."""

    assignment: AxisAssignment | PricedLayout
    cost: LayoutStepCost


@dataclass(frozen=True)
class Step:
    """A step to find a layout for, see ``LayoutCosts.step``; ``entries``: all KV at its end."""

    tokens: int
    sequences: int
    context: int
    entries: int


class LayoutSearch:
    """Searches the assignments of one model's axes on one mesh.

    Args:
        links: see ``LayoutCosts``.
        itemsize: see ``LayoutCosts``.

    Attributes:
        tried: number of assignments that were priced.
    """

    def __init__(
        self,
        model: ModelShape,
        mesh: Sizes,
        gpu: Gpu,
        links: Mapping[str, Link] | None = None,
        itemsize: int = 2,
    ) -> None:
        self._model, self._mesh, self._gpu = model, mesh, gpu
        self._links, self._itemsize = links, itemsize
        self.tried = 0

    def of_weights(self) -> list[AxisAssignment]:
        """Return assignments of the axes that cut weights; no two axes of a weight share one.

        If heads and columns do not divide, they are padded, or KV heads are copied.
        """
        D, E = self._model.hidden_size, self._model.num_experts
        every, experts = self._places(), self._divide(E) if E else [()]
        return [
            AxisAssignment(*places)
            for places in product(self._divide(D), every, every, experts)
            if _apart(places[0], places[1]) and _apart(places[0], places[2], places[3])
        ]

    def _places(self) -> list[Place]:
        axes = [axis for axis, size in self._mesh.items() if size > 1]
        return [place for n in range(len(axes) + 1) for place in combinations(axes, n)]

    def _divide(self, size: int) -> list[Place]:
        """Return the sets of mesh axes whose devices divide a logical axis."""
        found = []
        for place in self._places():
            pieces = 1
            for axis in place:
                pieces *= self._mesh[axis]
            if size % pieces == 0:
                found.append(place)
        return found

    def with_tokens(self, assignment: AxisAssignment) -> Iterator[AxisAssignment]:
        """Yield an assignment with tokens cut over each set of mesh axes in turn."""
        a = assignment
        for tokens in self._places():
            yield AxisAssignment(a.rows, a.heads, a.columns, a.experts, tokens)

    def price(self, assignment: AxisAssignment | PricedLayout, step: Step) -> Found | None:
        """Return the cost of an assignment; None if it does not fit on a card or is invalid."""
        self.tried += 1
        costs = self._costs(assignment)
        if not costs or not self._fits(costs, step):
            return None
        if costs.flow.sequence_ways > 1 and step.tokens != step.sequences:
            return None  # A prompt is one sequence.
        return Found(assignment, costs.step(step.tokens, step.sequences, step.context))

    def best(self, step: Step, progress: Callable[[int], None] = lambda left: None) -> Found | None:
        """Return the fastest assignment that fits, the first among equals; None if none fits.

        Weights and KV do not depend on how tokens are cut. An assignment that has no memory for
        them, or that takes longer to read them than the best step, is not tried further.
        """
        known = (self.price(PricedLayout(name), step) for name in PRICED)
        best = min(filter(None, known), key=lambda each: each.cost.step.total, default=None)
        weights = self.of_weights()
        for number, cut in enumerate(weights):
            progress(len(weights) - number)
            costs = self._costs(cut)
            if costs and not self._fits(costs, step):
                continue
            if best and self._at_least(step, cut) >= best.cost.step.total:
                continue
            for assignment in self.with_tokens(cut):
                found = self.price(assignment, step)
                if found and (best is None or found.cost.step.total < best.cost.step.total):
                    best = found
        progress(0)
        return best

    def _costs(self, assignment: AxisAssignment | PricedLayout) -> LayoutCosts | None:
        layout, mesh = assignment.layout(tuple(self._mesh)), self._mesh
        try:
            return at_peaks(self._model, layout, mesh, self._gpu, self._links, self._itemsize)
        except JaxinferError:  # The residual stream is cut by more than its rows allow.
            return None

    def _fits(self, costs: LayoutCosts, step: Step) -> bool:
        needed = costs.weight_bytes + costs.kept_bytes(step.sequences, step.entries)
        return needed <= self._gpu.memory_gb * 1e9

    def _at_least(self, step: Step, cut: AxisAssignment) -> float:
        """Return seconds that no cutting of tokens can save: all products, spread over
        all devices.
        """
        model, devices = self._model, 1
        for size in self._mesh.values():
            devices *= size
        experts = model.num_experts_per_tok or 1
        parameters = model.attention_parameters + experts * model.expert_parameters
        flops = 2 * step.tokens * parameters * model.num_hidden_layers / devices
        read = 0.0
        if not model.num_experts:
            of = {"D": cut.rows, "N": cut.heads, "K": cut.heads, "F": cut.columns}
            for path, shape in layer_parameters(model).items():
                numbers = 1.0
                for letter, size in zip(letters_of(path), shape, strict=True):
                    numbers *= size
                    for axis in of.get(letter, ()):
                        numbers /= self._mesh[axis]
                read += numbers * self._itemsize * model.num_hidden_layers
        return max(flops / (self._gpu.bf16_tflops * 1e12), read / (self._gpu.memory_gb_s * 1e9))


def _apart(*places: Place) -> bool:
    axes = [axis for place in places for axis in place]
    return len(axes) == len(set(axes))


def layout_file(assignment: AxisAssignment | PricedLayout, axes: tuple[str, ...]) -> str:
    """Return a Python file that defines an assignment's layout, for ``engine.layout``."""
    layout = assignment.layout(axes)
    lines = ["from jaxinfer.models.layouts import Layout, Rule", "", f"# {assignment}."]
    lines += ["LAYOUT = Layout(", "    parameters=("]
    lines += [f"        Rule({rule.pattern!r}, {rule.axes!r})," for rule in layout.parameters]
    lines += ["    ),", "    activations={"]
    lines += [f"        {name!r}: {table!r}," for name, table in layout.activations.items()]
    lines += ["    },", f"    kv={layout.kv!r},", f"    gathered={layout.gathered!r},", ")"]
    return "\n".join(lines) + "\n"
