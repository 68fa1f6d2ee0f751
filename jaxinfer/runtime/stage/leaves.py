"""A module's parameters as a tuple, which a compiled program takes faster than nnx's tree."""

from typing import Any, NamedTuple

import jax
from flax import nnx

Leaves = tuple[jax.Array, ...]


class Graph(NamedTuple):
    """A module without its parameters, and where each of these stands."""

    graphdef: nnx.GraphDef[Any]
    tree: Any

    def merge(self, leaves: Leaves) -> Any:
        """The module with such parameters."""
        return nnx.merge(self.graphdef, self.state(leaves))

    def state(self, leaves: Leaves) -> Any:
        """The parameters as nnx has them."""
        return jax.tree.unflatten(self.tree, leaves)


def flat(module: nnx.Module) -> tuple[Graph, Leaves]:
    """Take a module and its parameters apart."""
    graphdef, state = nnx.split(module)
    leaves, tree = jax.tree.flatten(state)
    return Graph(graphdef, tree), tuple(leaves)


def without_layers(graphdef: nnx.GraphDef[Any], parameters: nnx.State[Any, Any]) -> Any:
    """A model that has only what comes before its first layer and after its last one."""
    model: Any = nnx.merge(graphdef, parameters)
    if hasattr(model, "layers"):
        del model.layers
    return model
