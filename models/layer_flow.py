"""The products and collectives of one layer under a layout, from its tables alone.

An array [T, D] whose T lies on x is cut into as many parts; a product over a cut axis leaves
partial sums, which a reduce-scatter or an all-reduce adds up (Pope et al., 2022, section 3.1).
Sizes are of one device: numbers per token of a step, and of weights. This file needs no JAX.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from jaxinfer.hardware.catalogue import ModelShape
from jaxinfer.models.layout_checks import check_divides, check_places
from jaxinfer.models.layouts import Layout, in_use, most_ways

# Logical axis -> axes of the mesh, the outer one first.
Spec = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Collective:
    """One collective of a layer.

    Attributes:
        kind: as XLA names it.
        what: the activation or the parameter.
        axes: of the mesh, those it goes over.
        token_numbers: that each device sends, per token of the step; ``weights``: per step.
    """

    kind: str
    what: str
    axes: tuple[str, ...]
    token_numbers: float = 0.0
    weights: float = 0.0


@dataclass(frozen=True)
class Product:
    """One matrix product on one device.

    Attributes:
        weights: numbers of the weight as it is used, of one expert where it is one's.
        token_parameters: multiplications per token of the step.
        token_numbers: activations read and written, per token of the step.
        is_expert: one of the mixture's.
    """

    name: str
    weights: float
    token_parameters: float
    token_numbers: float
    is_expert: bool = False


@dataclass
class LayerFlow:
    """One decoder layer under a layout.

    Attributes:
        mesh: axis -> devices.
        heads_ways, rows_ways: into how many parts query heads, and rows of tokens, are cut where
            they attend; ``kv_ways``: KV heads in their pages. A device has one KV head at least:
            where there are more ways than heads, several have the same.
        experts_ways: into how many parts the experts are cut.

    Raises:
        JaxinferError: the layout does not fit the mesh or the model.
    """

    model: ModelShape
    layout: Layout
    mesh: Mapping[str, int]
    products: list[Product] = field(default_factory=list, init=False)
    collectives: list[Collective] = field(default_factory=list, init=False)
    heads_ways: int = field(default=1, init=False)
    rows_ways: int = field(default=1, init=False)
    kv_ways: int = field(default=1, init=False)
    experts_ways: int = field(default=1, init=False)

    def __post_init__(self) -> None:
        check_places(self.layout, self.mesh)
        self.layout, model = in_use(self.layout, tuple(self.mesh)), self.model
        self._sizes = {
            "T": 1,
            "D": model.hidden_size,
            "N": model.num_attention_heads,
            "K": model.num_key_value_heads,
            "H": model.head_size,
            "F": model.intermediate_size,
            "E": max(model.num_experts, 1),
            "V": model.vocab_size,
        }
        for letter in "DNE" if model.num_experts else "DN":
            pieces = most_ways(letter, self.layout, self.mesh)
            check_divides(letter, "the model", self._sizes[letter], pieces)
        residual = self._activation("residual", {})
        after = self._attention(residual)
        self._feed_forward(after)

    def parameter(self, path: str) -> dict[str, tuple[str, ...]]:
        """Where a parameter lies, by the first rule that matches its path."""
        rules = self.layout.parameters
        axes = next((rule.axes for rule in rules if fnmatchcase(path, rule.pattern)), {})
        letters = path.rpartition("_")[2]
        return {letter: _names(axes[letter]) for letter in letters if letter in axes}

    def parameters(self, layers: int, first: bool, last: bool) -> float:
        """Parameters of a stage on one device, but for norms and biases."""
        model, E = self.model, "E" if self.model.num_experts else ""
        names = ["attn.q_DNH", "attn.k_DKH", "attn.v_DKH", "attn.o_NHD"]
        names += [f"mlp.up_{E}DF", f"mlp.down_{E}FD", *[f"mlp.gate_{E}DF"] * model.gated]
        layer = sum(self._stored(f"layers.0.{name}") for name in names)
        table = self._stored("embed_VD")
        tables = table * (first or (last and model.tie_word_embeddings))
        if last and not model.tie_word_embeddings:
            tables += self._stored("head_VD")
        return layers * layer + tables

    @property
    def gathered_weights(self) -> float:
        """Numbers of other devices' weights of a layer that one has while it uses them."""
        return sum(each.weights for each in self.collectives)

    def _stored(self, path: str) -> float:
        return self.numbers(path.rpartition("_")[2], self.parameter(path))

    def numbers(self, letters: str, spec: Spec) -> float:
        """Numbers of an array on one device; of activations, per token of the step."""
        return math.prod(self._local(letter, spec) for letter in letters)

    def ways(self, axes: tuple[str, ...]) -> int:
        """Devices along these axes."""
        return math.prod(self.mesh[axis] for axis in axes)

    def _local(self, letter: str, spec: Spec) -> float:
        ways = self.ways(spec.get(letter, ()))
        if letter == "K":
            return max(self._sizes["K"] / ways, 1)
        return self._sizes[letter] / ways

    def _activation(self, name: str, default: Spec) -> Spec:
        found = self.layout.activations.get(name)
        if found is None:
            return default
        return {letter: _names(place) for letter, place in found.items()}

    def _weight(self, path: str) -> Spec:
        """Return where a weight lies as it is used, once it is gathered."""
        spec = self.parameter(f"layers.0.{path}")
        gathered = _names(self.layout.gathered)
        used = {
            letter: tuple(a for a in axes if a not in gathered) for letter, axes in spec.items()
        }
        over = tuple(a for axes in spec.values() for a in axes if a in gathered)
        if self.ways(over) > 1:
            letters = path.rpartition("_")[2]
            numbers = self.numbers(letters, used)
            moved = numbers * (1 - 1 / self.ways(over))
            self.collectives.append(Collective("all-gather", path, over, weights=moved))
        return used

    def _attention(self, residual: Spec) -> Spec:
        inputs = self._activation("attention_inputs", residual)
        self._norm(residual)
        self._move("attention_inputs", "TD", residual, inputs)
        q, k, v = (self._weight(f"attn.{name}") for name in ("q_DNH", "k_DKH", "v_DKH"))
        inputs = self._operand("attention_inputs", "TD", inputs, q, "D", "N")
        heads = self._partial("heads", "TNH", inputs, q, "heads")
        kv = heads
        for weight in (k, v):
            kv = self._partial("kv", "TKH", inputs, weight, "kv")
        pages = {"K": _names(self.layout.kv.get("K", ()))}
        for _ in "kv":
            self._move("kv", "TKH", kv, pages)
        D, H = self._local("D", q), self.model.head_size
        N, K = self._local("N", q), self._local("K", k)
        rows = self.ways(inputs.get("T", ()))
        weights = D * (N + 2 * K) * H
        self._product("qkv", weights, rows, D + (N + 2 * K) * H)
        self.heads_ways = self.ways(heads.get("N", ()))
        self.rows_ways = self.ways(heads.get("T", ()))
        self.kv_ways = self.ways(pages["K"])
        outputs = self._activation("attention_outputs", heads)
        self._move("attention_outputs", "TNH", heads, outputs)
        o, heads = self._weight("attn.o_NHD"), outputs
        heads = self._operand("attention_outputs", "TNH", heads, o, "N", "D")
        after = self._partial("residual", "TD", heads, o, "residual", over="N")
        N, D = self._local("N", o), self._local("D", o)
        self._product("o", N * H * D, self.ways(heads.get("T", ())), N * H + D)
        return after

    def _feed_forward(self, residual: Spec) -> None:
        mixture = bool(self.model.num_experts)
        E = "E" if mixture else ""
        name = "experts" if mixture else "ffn"
        inputs = self._activation("ffn_inputs", residual)
        self._norm(residual)
        self._move("ffn_inputs", "TD", residual, inputs)
        ups = ("gate", "up") if self.model.gated else ("up",)
        weights = [self._weight(f"mlp.{up}_{E}DF") for up in ups]
        up = weights[-1]
        inputs = self._operand("ffn_inputs", "TD", inputs, up, "D", f"{E}F")
        hidden = inputs
        for _ in ups:
            hidden = self._partial(name, f"T{E}F", inputs, up, name)
        D, F = self._local("D", up), self._local("F", up)
        rows, self.experts_ways = self.ways(inputs.get("T", ())), self.ways(up.get("E", ()))
        self._product("up", len(ups) * D * F, rows, D + len(ups) * F, mixture)
        down = self._weight(f"mlp.down_{E}FD")
        hidden = self._operand(name, f"T{E}F", hidden, down, f"{E}F", "D")
        self._partial("residual", "TD", hidden, down, "residual", over=f"{E}F")
        D, F = self._local("D", down), self._local("F", down)
        self._product("down", F * D, self.ways(hidden.get("T", ())), F + D, mixture)

    def _norm(self, spec: Spec) -> None:
        """A mean over D, which is a sum over devices where D is cut: one number a token."""
        axes = self._several(spec.get("D", ()))
        if axes:
            ways, rows = self.ways(axes), self.ways(spec.get("T", ()))
            moved = 2 * (1 - 1 / ways) / rows
            self.collectives.append(Collective("all-reduce", "norm", axes, moved))

    def _product(
        self, name: str, weights: float, rows: int, numbers: float, is_expert: bool = False
    ) -> None:
        self.products.append(Product(name, weights, weights / rows, numbers / rows, is_expert))

    def _operand(
        self, name: str, letters: str, have: Spec, weight: Spec, summed: str, kept: str
    ) -> Spec:
        """Move an operand to where its product with a weight needs it; return that.

        Its tokens cannot stay on axes that the weight has, and what is summed over lies alike.
        """
        taken = {a for letter in summed + kept for a in weight.get(letter, ())}
        want = {"T": tuple(a for a in have.get("T", ()) if a not in taken)}
        want |= {letter: weight.get(letter, ()) for letter in summed}
        self._move(name, letters, have, want)
        return want

    def _partial(
        self, name: str, letters: str, operand: Spec, weight: Spec, want_as: str, over: str = "D"
    ) -> Spec:
        """Add up a product's partial sums to where the layout wants them; return that."""
        made = {letter: weight.get(letter, ()) for letter in letters[1:] if letter != "H"}
        made["T"] = operand.get("T", ())
        want = self._activation(want_as, made if want_as != "residual" else {})
        summed = self._several(tuple(a for letter in over for a in weight.get(letter, ())))
        wanted = {a for letter in letters for a in want.get(letter, ())}
        scattered = tuple(a for a in summed if a in wanted)
        reduced = tuple(a for a in summed if a not in wanted)
        numbers = self.numbers(letters, made)
        if scattered:
            ways = self.ways(scattered)
            moved = numbers * (1 - 1 / ways)
            self.collectives.append(Collective("reduce-scatter", name, scattered, moved))
            numbers /= ways
            made = {
                letter: made.get(letter, ())
                + tuple(a for a in want.get(letter, ()) if a in scattered)
                for letter in letters
            }
        if reduced:
            moved = 2 * numbers * (1 - 1 / self.ways(reduced))
            self.collectives.append(Collective("all-reduce", name, reduced, moved))
        self._move(name, letters, made, want)
        return want

    def _move(self, name: str, letters: str, have: Spec, want: Spec) -> None:
        """Change where an array lies: a slice costs nothing."""
        had = {a: letter for letter in letters for a in self._several(have.get(letter, ()))}
        wanted = {a: letter for letter in letters for a in self._several(want.get(letter, ()))}
        turned = tuple(a for a in had if a in wanted and wanted[a] != had[a])
        gathered = tuple(a for a in had if a not in wanted)
        numbers = self.numbers(letters, have)
        if turned:
            moved = numbers * (1 - 1 / self.ways(turned))
            self.collectives.append(Collective("all-to-all", name, turned, moved))
        if gathered:
            ways = self.ways(gathered)
            moved = numbers * (ways - 1)
            self.collectives.append(Collective("all-gather", name, gathered, moved))

    def _several(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Those that have more than one device."""
        return tuple(axis for axis in axes if self.mesh[axis] > 1)


def _names(place: object) -> tuple[str, ...]:
    assert isinstance(place, tuple)
    return place
