"""Chooses the sides of a conformance table: few instances whose settings cover all pairs."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import combinations, product
from typing import Any

from jaxinfer.config.layer_split import by_shares
from jaxinfer.errors import JaxinferError
from jaxinfer.options.validation import did_you_mean, parse_yaml


@dataclass(frozen=True)
class HandOffSide:
    """The settings of one side of a hand-off, with their names in run files.

    Attributes:
        kernels: decides the layout of keys: ``plain`` stores them by head dimension, others by
            token.
        stages: number of pipeline stages; the first ones have fewer layers.
    """

    dtype: str = "float32"
    kv_cache_dtype: str = "auto"
    page_size: int = 16
    kernels: str = "plain"
    tensor_parallel_size: int = 1
    stages: int = 1

    def __str__(self) -> str:
        kv = "" if self.kv_cache_dtype == "auto" else f", {self.kv_cache_dtype} KV"
        keys = "head dim" if self.kernels == "plain" else "token"
        return (
            f"{self.dtype}{kv}, pages of {self.page_size}, keys by {keys}, "
            f"TP {self.tensor_parallel_size}, PP {self.stages}"
        )

    @property
    def devices(self) -> int:
        """Number of devices of all stages."""
        return self.tensor_parallel_size * self.stages

    def sections(self, group: str, layers: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return a group and an instance of a run file, for a model of ``layers`` layers."""
        tp = self.tensor_parallel_size
        instance: dict[str, Any] = {"group": group}
        if self.stages > 1:
            # Unequal cuts, because cuts of sides with different numbers of stages seldom coincide.
            # More cuts than layers are refused as they are.
            many = self.stages > layers
            counts = by_shares(layers, [1] if many else range(1, self.stages + 1))
            stages: list[dict[str, Any]] = [{"group": group, "layers": count} for count in counts]
            instance = {"stages": [{"group": group}] * self.stages if many else stages}
        for name in ("dtype", "kv_cache_dtype", "page_size", "kernels"):
            instance[name] = getattr(self, name)
        return {"devices": self.devices, "tensor_parallel_size": tp}, instance


Values = Mapping[str, Sequence[Any]]
# Number of orders in which the greedy cover is tried; the smallest cover is used.
_TRIES = 30
# Values to try for each setting; the first of each make the reference.
VALUES: dict[str, tuple[Any, ...]] = {
    "dtype": ("float32", "bfloat16"),
    "kv_cache_dtype": ("auto", "int8", "fp8"),
    "page_size": (16, 24, 64),
    "kernels": ("plain", "interpret"),
    "tensor_parallel_size": (1, 2),
    "stages": (1, 2),
}


# Names of a setting's values.
_KIND_WORDS: Mapping[type, str] = {int: "an integer from 1 on", str: "a name"}


def with_values(given: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """Return ``VALUES``, after replacing the settings given as ``NAME=A,B``.

    Raises:
        JaxinferError: a setting is unknown or given twice, or a value has another type.
    """
    values, seen = dict(VALUES), dict[str, str]()
    for text in given:
        name, _, listed = text.partition("=")
        if name in seen:
            raise JaxinferError(
                f"--values {text}: {name} has values by {seen[name]}: give all of them once, "
                f"{seen[name]},{listed}"
            )
        seen[name] = text
        if name not in VALUES:
            raise JaxinferError(
                f"--values {text}: no setting {name!r}: {did_you_mean(name, VALUES)}"
            )
        try:
            found = parse_yaml(f"[{listed}]")
        except JaxinferError as error:
            raise JaxinferError(f"--values {text}: {error}") from None
        kind = type(VALUES[name][0])
        if (
            not isinstance(found, list)
            or not found
            or any(type(value) is not kind or value in (0, "") for value in found)
        ):
            raise JaxinferError(
                f"--values {text}: must be {name}=A,B,... with {_KIND_WORDS[kind]} each"
            )
        values[name] = tuple(dict.fromkeys(found))
    return values


def covering_sides(values: Values) -> list[HandOffSide]:
    """Return a few sides in which any two settings occur with every pair of their values.

    Sides whose hand-offs can be exact keep KV in their own dtype. Among these, each value of the
    other settings also occurs with each dtype. In pairs of such sides, any two settings of one then
    meet any two of the other. The first side has the first of all values.
    """
    first, *rows = (
        HandOffSide(*row) for row in product(*(values[field.name] for field in fields(HandOffSide)))
    )
    found = []
    for seed in range(_TRIES):
        random.Random(seed).shuffle(rows)
        found.append(_cover([first, *rows]))
    return min(found, key=len)


def _cover(sides: Sequence[HandOffSide]) -> list[HandOffSide]:
    """Choose sides greedily: each time the one that covers the most new pairs, the first
    of equals.
    """
    brought = {side: set(_wanted(side)) for side in sides}
    left = set().union(*brought.values())
    chosen = [sides[0]]
    while left := left - brought[chosen[-1]]:
        chosen.append(max(sides, key=lambda side: len(left & brought[side])))
    return chosen


def _wanted(side: HandOffSide) -> Iterator[tuple[Any, ...]]:
    settings = [(field.name, getattr(side, field.name)) for field in fields(side)]
    yield from combinations(settings, 2)
    if side.kv_cache_dtype == "auto":
        yield from ((side.dtype, *setting) for setting in settings)
