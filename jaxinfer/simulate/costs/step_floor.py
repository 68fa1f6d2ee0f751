"""Lower bounds on the times of a stage's steps, linear in the contents of the steps."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ProductFloor:
    """A matrix product; it takes the longer of computing and reading.

    Attributes:
        compute_s: seconds per token to compute.
        weights_s: seconds per step to read the weights.
        moved_s: seconds per token to move its own bytes.
    """

    compute_s: float
    weights_s: float
    moved_s: float

    def seconds(self, tokens: float, steps: float = 1) -> float:
        """Return the least seconds for a number of tokens in a number of steps."""
        return max(tokens * self.compute_s, steps * self.weights_s + tokens * self.moved_s)


@dataclass(frozen=True)
class StepFloor:
    """The parts of a step of one pipeline stage, over all its layers.

    Steps with given totals take at least as long as equal steps (Jensen's inequality: each part is
    convex), and equal steps take the sum of these parts.

    Attributes:
        products: products computed for all tokens.
        head: product computed for sampled tokens, in the last stage.
        step_s: seconds per step.
        token_s: seconds per token.
        sequence_s: seconds per row.
        context_s: seconds per KV entry that a decode sees.
        pair_s: seconds per pair of a prompt's token and an entry that it sees.
    """

    products: tuple[ProductFloor, ...] = ()
    head: ProductFloor | None = None
    step_s: float = 0.0
    token_s: float = 0.0
    sequence_s: float = 0.0
    context_s: float = 0.0
    pair_s: float = 0.0
