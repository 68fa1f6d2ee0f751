"""From Hugging Face's layout of a tensor, where linear weights are [out, in], to a parameter's."""

from jaxinfer.models.config import WeightSpec


def same(name: str, *shape: int) -> WeightSpec:
    """Return the spec of a parameter that is its tensor as it is."""
    return WeightSpec(name, shape, lambda array: array)


def transposed(name: str, out: int, into: int) -> WeightSpec:
    """[out, in] to [in, out]."""
    return WeightSpec(name, (out, into), lambda array: array.T)


def stacked(name: str, count: int, out: int, into: int) -> WeightSpec:
    """One [out, in] for each expert, named with its number for ``{}``, to [E, in, out]."""
    names = tuple(name.format(i) for i in range(count))
    return WeightSpec(names, (out, into), lambda array: array.T)


def heads_out(name: str, heads: int, head_dim: int, into: int) -> WeightSpec:
    """[heads * H, in] to [in, heads, H]."""
    return WeightSpec(
        name,
        (heads * head_dim, into),
        lambda x: x.reshape(heads, head_dim, into).transpose(2, 0, 1),
    )


def heads_in(name: str, heads: int, head_dim: int, out: int) -> WeightSpec:
    """[out, heads * H] to [heads, H, out]."""
    return WeightSpec(name, (out, heads * head_dim), lambda x: x.T.reshape(heads, head_dim, out))


def heads_bias(name: str, heads: int, head_dim: int) -> WeightSpec:
    """[heads * H] to [heads, H]."""
    return WeightSpec(name, (heads * head_dim,), lambda x: x.reshape(heads, head_dim))
