"""Converts tensors from Hugging Face's layout, where linear weights are [out, in], to ours."""

from collections.abc import Callable
from functools import cache
from typing import Any

from jaxinfer.models.config import WeightSpec


def same(name: str, *shape: int) -> WeightSpec:
    """Return the spec of a parameter that equals its tensor."""
    return WeightSpec(name, shape, as_it_is)


def transposed(name: str, out: int, into: int) -> WeightSpec:
    """Convert [out, in] to [in, out]."""
    return WeightSpec(name, (out, into), _turned)


def stacked(name: str, count: int, out: int, into: int) -> WeightSpec:
    """Stack one [out, in] per expert to [E, in, out]; ``{}`` in the name is its number."""
    names = tuple(name.format(i) for i in range(count))
    return WeightSpec(names, (out, into), _turned)


def heads_out(name: str, heads: int, head_dim: int, into: int) -> WeightSpec:
    """Convert [heads * H, in] to [in, heads, H]."""
    return WeightSpec(name, (heads * head_dim, into), _heads_last(heads, head_dim))


def heads_in(name: str, heads: int, head_dim: int, out: int) -> WeightSpec:
    """Convert [out, heads * H] to [heads, H, out]."""
    return WeightSpec(name, (out, heads * head_dim), _heads_first(heads, head_dim))


def heads_bias(name: str, heads: int, head_dim: int) -> WeightSpec:
    """Convert [heads * H] to [heads, H]."""
    return WeightSpec(name, (heads * head_dim,), lambda x: x.reshape(heads, head_dim))


def as_it_is(x: Any) -> Any:
    """Return the array itself."""
    return x


def _turned(x: Any) -> Any:
    return x.T


@cache
def _heads_last(heads: int, head_dim: int) -> Callable[[Any], Any]:
    return lambda x: x.reshape(heads, head_dim, -1).transpose(2, 0, 1)


@cache
def _heads_first(heads: int, head_dim: int) -> Callable[[Any], Any]:
    return lambda x: x.T.reshape(heads, head_dim, -1)
