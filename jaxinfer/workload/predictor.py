"""Predictors of answer lengths, called when requests arrive."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from pydantic import Field

from jaxinfer.errors import FAILURES, JaxinferError, raised
from jaxinfer.options.validation import (
    OptionError,
    Options,
    import_own,
    make_with_options,
    shown,
    within,
)
from jaxinfer.serving.views import RequestView


class PromptView(RequestView, Protocol):
    """A request as predictors see it, including its prompt."""

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        """Token ids of the prompt; empty if a modelled run knows only the length."""


# Smallest and largest number of output tokens; None if nothing is predicted.
Predict = Callable[[PromptView], tuple[int, int] | None]
# A user's own class: my_module:MyPredictor, or a ``name`` with options.
Own = str | dict[str, Any]


class Buckets(Options):
    """A predictor for modelled runs, which knows the true length and errs on purpose.

    This models TetriInfer's classifier (section 3.3.2) by its accuracy: bucket k has the lengths
    from ``k * granularity`` up to, but not including, ``(k + 1) * granularity``.

    Attributes:
        granularity: Number of tokens of a bucket.
        accuracy: Share of predictions that name the true length's bucket; the others name one of
            its two neighbours, with equal probability.
        seed: Seed of the draws.
    """

    granularity: int = Field(ge=1)
    accuracy: float = Field(ge=0, le=1)
    seed: int = 0

    @property
    def is_drawn(self) -> bool:
        """True if the predictions depend on a seed; a predictor that never errs draws nothing."""
        return self.accuracy < 1


class BucketPredictor:
    """Draws predictions in the order in which requests arrive, whatever the system does.

    Args:
        num_output: returns a request's true number of output tokens.
    """

    def __init__(self, options: Buckets, num_output: Callable[[RequestView], int]) -> None:
        self._options, self._num_output = options, num_output
        self._rng = random.Random(options.seed)

    def __call__(self, request: RequestView) -> tuple[int, int]:
        """Return the bounds of a bucket."""
        size = self._options.granularity
        bucket = self._num_output(request) // size
        if self._rng.random() >= self._options.accuracy:
            # There is none below the first bucket.
            bucket += self._rng.choice((-1, 1)) if bucket else 1
        return bucket * size, (bucket + 1) * size


class OwnPredictor:
    """A predictor that a user wrote: a function or a class; its mistakes become one-line errors.

    Args:
        given: ``my_module:MyPredictor``, or a mapping of that ``name`` and the options of a class
            that has a class ``Options``.

    Raises:
        JaxinferError: it does not exist, it cannot be called, or its options are wrong.
    """

    def __init__(self, given: Own) -> None:
        options = dict(given) if isinstance(given, dict) else {"name": given}
        self._name = options.pop("name")
        try:
            self._predict = self._find(options)
        except JaxinferError as error:
            raise within("workload.predictor", error) from None

    def _find(self, options: Mapping[str, Any]) -> Callable[..., Any]:
        found: Any = import_own(self._name)
        if isinstance(found, type):
            return make_with_options(found, options)
        if options:
            raise OptionError(f"{next(iter(options))}: {self._name} has no options")
        if not callable(found):
            raise JaxinferError(f"{self._name!r} is {shown(found)}, must be a function or a class")
        function: Callable[..., Any] = found
        return function

    def _raises(self, error: BaseException) -> str:
        return f"{self._name} raises {raised(error)}"

    def __call__(self, request: PromptView) -> tuple[int, int] | None:
        """Return the checked prediction."""
        try:
            answer = self._predict(request)
        except JaxinferError as error:
            raise within("workload.predictor", error) from None
        except FAILURES as error:
            raise JaxinferError(f"workload.predictor: {self._raises(error)}") from error
        if answer is None:
            return None
        if not _is_range(answer):
            raise JaxinferError(
                f"workload.predictor: {self._name} returns {shown(answer)} for request "
                f"{request.id!r}, must be output tokens, (at least, at most), or None"
            )
        return answer[0], answer[1]


def _is_range(answer: Any) -> bool:
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        return False
    return all(type(bound) is int for bound in answer) and 0 <= answer[0] <= answer[1]


def modelled_predictor(
    given: Buckets | Own | None, num_output: Callable[[RequestView], int]
) -> Predict | None:
    """Make a predictor for one simulated run.

    ``num_output`` returns true lengths, which a user's own predictor never sees.

    Raises:
        JaxinferError: the user's own predictor cannot be used.
    """
    if isinstance(given, Buckets):
        return BucketPredictor(given, num_output)
    return OwnPredictor(given) if given is not None else None


def real_predictor(given: Buckets | Own | None) -> Predict | None:
    """Make a predictor for a real run, in which true lengths are not known.

    Raises:
        JaxinferError: it needs the true length, or the user's own cannot be used.
    """
    if isinstance(given, Buckets):
        raise OptionError(
            "workload.predictor: buckets go by the true length, which only a modelled run knows; a "
            "real one takes my_module:MyPredictor"
        )
    return OwnPredictor(given) if given is not None else None
