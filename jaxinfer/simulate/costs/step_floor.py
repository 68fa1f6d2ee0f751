"""The least that a stage's steps can take: times that are linear in what steps hold."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ProductFloor:
    """A matrix product, which takes the longer of computing and reading.

    Attributes:
        compute_s: seconds per token by FLOPs.
        weights_s: seconds per step by the weights' bytes; ``moved_s``: per token by its own bytes.
    """

    compute_s: float
    weights_s: float
    moved_s: float

    def seconds(self, tokens: float, steps: float = 1) -> float:
        """Return the least seconds for a number of tokens in a number of steps."""
        return max(tokens * self.compute_s, steps * self.weights_s + tokens * self.moved_s)


@dataclass(frozen=True)
class StepFloor:
    """The parts of a step of one pipeline stage, of all its layers.

    Steps with given totals take at least as long as steps that are all alike (Jensen's inequality:
    each part is convex), and those take the sum of these parts.

    Attributes:
        products: by all tokens; ``head``: by the tokens that are sampled, of the last stage.
        step_s: seconds of each step; ``token_s``, ``sequence_s``: seconds of each token and row.
        context_s: seconds of each KV entry that a decode sees.
        pair_s: seconds of each pair of a prompt's token and an entry that it sees.
    """

    products: tuple[ProductFloor, ...] = ()
    head: ProductFloor | None = None
    step_s: float = 0.0
    token_s: float = 0.0
    sequence_s: float = 0.0
    context_s: float = 0.0
    pair_s: float = 0.0
