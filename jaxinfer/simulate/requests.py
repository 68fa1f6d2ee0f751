"""The requests of a modelled run: their true lengths, and the facts that a system may see."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from operator import attrgetter

from jaxinfer.config.cluster import InstanceConfig
from jaxinfer.config.workload import Workload
from jaxinfer.errors import JaxinferError
from jaxinfer.serving.loop import Stop
from jaxinfer.serving.releases import Releases
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.views import RequestView
from jaxinfer.workload.bench_request import BenchRequest, NamedTokens, modelled_tokens
from jaxinfer.workload.named_blocks import Beginnings
from jaxinfer.workload.predictor import Predict, modelled_predictor


class ModelledRequests:
    """Requests of given lengths.

    Args:
        options: with ``max_tokens``, all requests show this limit instead of their true length.
        instances: the cluster's instances; each must be able to serve each request.
        longest: largest number of tokens of a request, if no instance's own limit is lower.

    Attributes:
        has_tokens: whether the tokens of some prompt are known.

    Raises:
        JaxinferError: there is no request, or one is longer than an instance or users allow.
    """

    def __init__(
        self,
        work: Sequence[BenchRequest],
        options: Workload,
        instances: Mapping[str, InstanceConfig],
        longest: int | None = None,
    ) -> None:
        limits = [longest, *(instance.max_model_len for instance in instances.values())]
        self._longest = min((limit for limit in limits if limit), default=math.inf)
        self._work, self._limit, self._predictor = work, options.max_tokens, options.predictor
        self._beginnings = Beginnings()
        self._check()
        self.has_tokens = any(item.has_tokens for item in work)

    def __len__(self) -> int:
        return len(self._work)

    @property
    def num_output(self) -> Callable[[RequestView], int]:
        """A function that returns the number of output tokens at which a request ends."""
        return self._true_length if self._limit else attrgetter("max_tokens")

    @property
    def check_stop(self) -> Callable[[RequestState, int], Stop | None] | None:
        """The check that ends requests before their limits; None if there is none."""
        return self._stop_at_length if self._limit else None

    @cached_property
    def predict(self) -> Predict | None:
        """Predictor of the requests' lengths; None if there is none.

        Raises:
            JaxinferError: the user's own predictor cannot be used.
        """
        return modelled_predictor(self._predictor, self.num_output)

    def by_arrival(self) -> Iterator[RequestState]:
        """Make the requests that wait for no other's end, one by one to save memory."""
        work = self._work
        for number in sorted(range(len(work)), key=lambda number: work[number].arrival):
            if not work[number].after_ends and work[number].follows is None:
                yield self.state(number, work[number].arrival)

    def by_ends(self) -> Releases[int]:
        """Return the numbers of the requests that wait for others to end."""
        found: Releases[int] = Releases()
        for number, item in enumerate(self._work):
            if item.follows is not None:
                found.hold_for(str(item.follows), number)
            elif item.after_ends:
                found.hold(item.after_ends, number)
        return found

    def after_an_end(self, number: int, ended: RequestState, now: float) -> RequestState:
        """Make a request that waited for others; ``ended``, the last of them, ended at ``now``."""
        request = self.state(number, now + self._work[number].arrival)
        if self._work[number].follows is not None:
            request.take_history(ended)
        return request

    def state(self, number: int, arrival: float) -> RequestState:
        """Make the state with which one request enters the loop."""
        item, shown = self._work[number], self._work[number].max_tokens
        if self._limit:
            shown = int(min(self._limit, self._longest - item.prompt_len))
        named = bool(item.hash_ids and not item.prompt_token_ids)
        tokens = NamedTokens(item) if named else modelled_tokens(item, number)
        state = RequestState(str(number), item.prompt_len, shown, arrival, tokens)
        state.session = None if item.session is None else str(item.session)
        if named:
            state.prompt_digests = partial(self._beginnings.pages, item)
        return state

    def _check(self) -> None:
        if not self._work:
            raise JaxinferError("no requests")
        for number, item in enumerate(self._work):
            if item.prompt_len + item.max_tokens > self._longest:
                raise JaxinferError(
                    f"request {number}: {item.prompt_len} prompt and {item.max_tokens} output "
                    f"tokens, max_model_len is {self._longest}"
                )
            if self._limit and item.max_tokens > self._limit:
                raise JaxinferError(
                    f"workload.max_tokens is {self._limit}, must be at least the output tokens of "
                    f"each request: request {number} has {item.max_tokens}"
                )

    def _true_length(self, request: RequestView) -> int:
        return self._work[int(request.id)].max_tokens

    def _stop_at_length(self, request: RequestState, token: int) -> Stop | None:
        sampled, length = len(request.output_token_ids), self._true_length(request)
        return ("stop", None) if sampled == length < request.max_tokens else None
