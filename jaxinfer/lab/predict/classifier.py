"""A small classifier of feature vectors, and how to train it.

Shape suffixes: N examples, F features, D hidden units, K classes.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxinfer.options.validation import Options


class Classifier(nnx.Module):
    """A linear classifier, with one hidden layer if there are hidden units.

    Args:
        num_hidden: number of hidden units; 0 is logistic regression.
    """

    def __init__(self, num_features: int, num_hidden: int, num_classes: int, seed: int = 0) -> None:
        rngs = nnx.Rngs(seed)
        self.hidden = nnx.Linear(num_features, num_hidden, rngs=rngs) if num_hidden else None
        self.out = nnx.Linear(num_hidden or num_features, num_classes, rngs=rngs)

    def __call__(self, x_NF: jax.Array) -> jax.Array:
        """Return logits [N, K]."""
        return self.out(jax.nn.gelu(self.hidden(x_NF)) if self.hidden else x_NF)


class Training(Options):
    """Options for training a classifier.

    Attributes:
        epochs: number of passes over the examples.
        batch: number of examples per step of the optimiser.
        learning_rate: learning rate of AdamW.
        weight_decay: weight decay of AdamW.
        seed: seed of the first weights and of the order of examples.
    """

    epochs: int = 40
    batch: int = 32
    learning_rate: float = 3e-3
    weight_decay: float = 1e-2
    seed: int = 0


def train(
    x_NF: np.ndarray, class_N: np.ndarray, num_classes: int, num_hidden: int, options: Training
) -> Classifier:
    """Return a new classifier trained on the examples."""
    model = Classifier(x_NF.shape[1], num_hidden, num_classes, options.seed)
    optimiser = optax.adamw(options.learning_rate, weight_decay=options.weight_decay)
    graphdef, state = nnx.split(model)
    memory = optimiser.init(state)
    step = jax.jit(partial(_step, graphdef, optimiser))
    for rows in _batches(len(x_NF), options):
        state, memory = step(state, memory, x_NF[rows], class_N[rows])
    found: Classifier = nnx.merge(graphdef, state)
    return found


def _batches(count: int, options: Training) -> Iterator[np.ndarray]:
    """Yield batches of equal shape; the remainder of one epoch may come in another."""
    rng, size = np.random.default_rng(options.seed), min(options.batch, count)
    for _ in range(options.epochs):
        order = rng.permutation(count)
        for start in range(0, count - size + 1, size):
            yield order[start : start + size]


def _step(
    graphdef: Any, optimiser: Any, state: Any, memory: Any, x_NF: Any, class_N: Any
) -> tuple[Any, Any]:
    def loss(state: Any) -> jax.Array:
        logits_NK = nnx.merge(graphdef, state)(x_NF)
        found = optax.softmax_cross_entropy_with_integer_labels(logits_NK, class_N)
        return jnp.mean(found)

    updates, memory = optimiser.update(jax.grad(loss)(state), memory, state)
    return optax.apply_updates(state, updates), memory


@partial(jax.jit, static_argnums=0)
def likeliest(graphdef: Any, state: Any, x_NF: Any) -> jax.Array:
    """Return the likeliest class of each example, given a model that ``nnx.split`` has split."""
    return jnp.argmax(nnx.merge(graphdef, state)(x_NF), -1)


def classify(model: Classifier, x_NF: np.ndarray) -> np.ndarray:
    """Return the likeliest class of each example."""
    return np.asarray(likeliest(*nnx.split(model), x_NF))
