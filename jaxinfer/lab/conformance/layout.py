"""Layout of one side's KV: its devices, its pages, and the order within a page."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jaxinfer.lab.conformance.formats import FORMATS
from jaxinfer.lab.conformance.golden import GoldenModel, check_counts

# A page's axes: N tokens, H heads, D channels.
Order = Literal["NHD", "HND", "HDN"]
# From [page, head, token, channel], the order in this package.
_AXES: dict[str, tuple[int, ...]] = {"HND": (0, 1, 2, 3), "NHD": (0, 2, 1, 3), "HDN": (0, 1, 3, 2)}


@dataclass(frozen=True)
class KVLayout:
    """How one side stores KV: split over devices, stages, order of a page's axes, number format.

    Attributes:
        tp: number of devices over which KV heads are split. With more devices than heads, heads are
            copied; if heads do not divide, the last device is padded.
        stages: numbers of layers of each pipeline stage; () for one stage.
        keys: order of a page's axes for keys. ``HDN`` has a channel's tokens side by side.
        values: order of a page's axes for values.
        kv_dtype: format of entries; those of 8 bits have a scale per page and head.
    """

    tp: int = 1
    stages: tuple[int, ...] = ()
    page_size: int = 16
    kv_dtype: str = "float32"
    keys: Order = "HND"
    values: Order = "HND"

    def __post_init__(self) -> None:
        if self.kv_dtype not in FORMATS:
            raise ValueError(f"kv_dtype is {self.kv_dtype}, must be one of {', '.join(FORMATS)}")
        counts = {f"stages[{n}]": count for n, count in enumerate(self.stages)}
        check_counts("KVLayout", {"tp": self.tp, "page_size": self.page_size} | counts)
        for name in ("keys", "values"):
            if getattr(self, name) not in _AXES:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}, must be one of {', '.join(_AXES)}"
                )

    def __str__(self) -> str:
        stages = "/".join(map(str, self.stages)) or "all"
        order = self.keys if self.keys == self.values else f"{self.keys}+{self.values}"
        return f"TP{self.tp} PP{stages} page{self.page_size} {self.kv_dtype} {order}"

    def shards(self, model: GoldenModel) -> Iterator["LayerPages"]:
        """Yield each layer's part on each device."""
        stages = self.stages or (model.layers,)
        if sum(stages) != model.layers:
            raise ValueError(f"stages are {stages}, the model has {model.layers} layers")
        layer = 0
        for stage, layers in enumerate(stages):
            for _ in range(layers):
                for rank in range(self.tp):
                    yield LayerPages(stage, rank, layer)
                layer += 1

    def heads_of(self, model: GoldenModel, rank: int) -> np.ndarray:
        """Return the model's heads on a device, in its order; -1 for padding."""
        if self.tp > model.heads:
            if self.tp % model.heads:
                raise ValueError(f"tp is {self.tp}, the model has {model.heads} KV heads")
            return np.array([rank // (self.tp // model.heads)])
        each = -(-model.heads // self.tp)
        heads = np.arange(rank * each, (rank + 1) * each)
        return np.where(heads < model.heads, heads, -1)

    def order(self, part: int) -> Order:
        """Return the order of a page's axes for keys (0) or values (1)."""
        return self.values if part else self.keys


@dataclass(frozen=True)
class LayerPages:
    """A layer's pages on one device of one stage."""

    stage: int
    rank: int
    layer: int


def to_order(pages_PKBH: np.ndarray, order: str) -> np.ndarray:
    """Reorder [page, head, token, channel] to a pool's order."""
    return np.ascontiguousarray(pages_PKBH.transpose(_AXES[order]))


def from_order(pages: np.ndarray, order: str) -> np.ndarray:
    """Return a view of a pool's pages as [page, head, token, channel]; writes change the pool."""
    return pages.transpose(np.argsort(_AXES[order]))
