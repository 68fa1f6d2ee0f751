"""A policy that orders requests by predicted lengths, for ``policies.order`` of a run file."""

from collections.abc import Sequence

from jaxinfer.serving.request_state import RequestState


def shortest_answer_first(waiting: Sequence[RequestState]) -> RequestState:
    """Choose the request with the least predicted minimum, or else limit; of equals, the first."""
    return min(
        waiting,
        key=lambda request: request.predicted[0] if request.predicted else request.max_tokens,
    )
