"""The consecutive layers of a model that one pipeline stage has."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from flax import nnx

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.eight_bits import add_scales
from jaxinfer.models.registry import ARCHITECTURES

# A model has parts before its first layer and after its last one.
_BEFORE, _AFTER = ("embed_VD", "position_XD"), ("norm", "head_VD")


@dataclass(frozen=True)
class Layers:
    """Layers ``start`` to ``stop`` of ``total``."""

    start: int
    stop: int
    total: int

    @property
    def first(self) -> bool:
        """True if the stage embeds tokens."""
        return self.start == 0

    @property
    def last(self) -> bool:
        """True if the stage samples tokens."""
        return self.stop == self.total

    def overlaps(self, other: "Layers") -> bool:
        """Tell whether both ranges contain a common layer."""
        return max(self.start, other.start) < min(self.stop, other.stop)

    def path(self, name: str) -> str:
        """Return a parameter's path in the whole model, given its path in the stage's."""
        return _shift(name, self.start)

    def name(self, path: str) -> str:
        """Return a parameter's path in the stage's model, given its path in the whole one's."""
        return _shift(path, -self.start)

    def pieces(self, count: int) -> list["Layers"]:
        """Divide the layers into ``count`` ranges.

        If they do not divide evenly, the first ranges have one layer more.
        """
        size, more = divmod(self.stop - self.start, count)
        edges = [self.start + i * size + min(i, more) for i in range(count + 1)]
        return [Layers(a, b, self.total) for a, b in pairwise(edges)]


def split(total: int, counts: Sequence[int]) -> list[Layers]:
    """Return stages with these numbers of layers, which add up to ``total``."""
    assert sum(counts) == total, (total, counts)
    starts = [sum(counts[:i]) for i in range(len(counts))]
    return [Layers(a, a + n, total) for a, n in zip(starts, counts, strict=True)]


# Parts of the layers of a stage: all, all but the FFN, or the FFN alone, as "layers.N.mlp".
Part = Literal["all", "attention", "ffn"]


def make_model(
    config: ModelConfig, layers: Layers, rngs: nnx.Rngs, part_of_layers: Part = "all"
) -> Any:
    """Make the architecture's model with only these layers, or one part of each.

    The first stage has the embedding, the last one the final norm and the head, which may be the
    embedding again. Parameters outside the layers are with attention.
    """
    part = replace(
        config,
        num_hidden_layers=layers.stop - layers.start,
        windows=config.windows[layers.start : layers.stop],
    )
    model = ARCHITECTURES[config.architecture].model(part, rngs)
    if config.eight_bits:
        add_scales(model, config.eight_bits, {layers.name(path) for path in config.wide_weights})
    kept: set[str] = set()
    if layers.first:
        kept.update(_BEFORE)
    if layers.last:
        kept.update(_AFTER)
        if config.tie_word_embeddings:
            kept.add("embed_VD")
    for name in (*_BEFORE, *_AFTER):
        if name not in kept and hasattr(model, name):
            delattr(model, name)
    if part_of_layers == "attention":
        for layer in model.layers:
            del layer.mlp
    elif part_of_layers == "ffn":
        return _Ffn([layer.mlp for layer in model.layers])
    return model


class _Ffn(nnx.Module):
    """The FFN of each layer, by the names that they have in the model."""

    def __init__(self, ffns: Sequence[nnx.Module]) -> None:
        self.layers = nnx.List([_FfnOfLayer(ffn) for ffn in ffns])


class _FfnOfLayer(nnx.Module):
    def __init__(self, mlp: nnx.Module) -> None:
        self.mlp = mlp


def _shift(name: str, by: int) -> str:
    head, _, rest = name.partition(".")
    if head != "layers":
        return name
    number, _, tail = rest.partition(".")
    return f"layers.{int(number) + by}.{tail}"
