"""A module's parameters as a tuple, which compiled programs accept faster than nnx's tree."""

from typing import Any, NamedTuple

import jax
from flax import nnx

Leaves = tuple[jax.Array, ...]


class Graph(NamedTuple):
    """A module without its parameters, and the structure of the parameters."""

    graphdef: nnx.GraphDef[Any]
    tree: Any

    def merge(self, leaves: Leaves) -> Any:
        """Return the module with these parameters."""
        return nnx.merge(self.graphdef, self.state(leaves))

    def state(self, leaves: Leaves) -> Any:
        """Return these parameters in nnx's form."""
        return jax.tree.unflatten(self.tree, leaves)


def flat(module: nnx.Module) -> tuple[Graph, Leaves]:
    """Split a module from its parameters."""
    graphdef, state = nnx.split(module)
    leaves, tree = jax.tree.flatten(state)
    return Graph(graphdef, tree), tuple(leaves)


def without_layers(graphdef: nnx.GraphDef[Any], parameters: nnx.State[Any, Any]) -> Any:
    """Return a model with only the parts before its first layer and after its last one."""
    model: Any = nnx.merge(graphdef, parameters)
    if hasattr(model, "layers"):
        del model.layers
    return model
