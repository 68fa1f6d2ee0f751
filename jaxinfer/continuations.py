"""Several continuations of one prompt: who waits for whom, and when all are done."""

from collections.abc import Sequence

from jaxinfer.errors import JaxinferError
from jaxinfer.runtime.sampling_inputs import sampling_of
from jaxinfer.serving.request_state import RequestState


class Continuations:
    """The requests of one run, grouped by the request that they were made from.

    With prefix caching, the others wait until the first has computed a prompt of at least one
    full page, and then go to the head of the queue, before its pages are evicted.

    Args:
        requests: as ``LLM.make_requests`` makes them.
        page_size: of the prefix cache, or None without one.

    Attributes:
        num_parents: requests as the user counts them.
        at_once: requests that wait for none.
        held_back: the others, by the request that they were made from.

    Raises:
        JaxinferError: two requests have one id, or one has been in a run.
    """

    def __init__(self, requests: Sequence[RequestState], page_size: int | None) -> None:
        self._unfinished: dict[str, list[RequestState]] = {}
        self.held_back: dict[str, list[RequestState]] = {}
        self.at_once: list[RequestState] = []
        ids = set()
        for request in requests:
            if not isinstance(request, RequestState):
                raise JaxinferError(f"request {request!r} is none that make_requests has made")
            if request.epoch or request.legs or request.computed:
                raise JaxinferError(
                    f"request {request.id!r} is used up: make_requests makes new ones"
                )
            if request.id in ids:
                raise JaxinferError(f"two requests have the id {request.id!r}")
            ids.add(request.id)
            parent = sampling_of(request).parent
            siblings = self._unfinished.setdefault(parent, [])
            siblings.append(request)
            if page_size and len(siblings) > 1 and request.prompt_len > page_size:
                request.goes_first = True
                self.held_back.setdefault(parent, []).append(request)
            else:
                self.at_once.append(request)
        self.num_parents = len(self._unfinished)

    def released_by(self, request: RequestState) -> list[RequestState]:
        """Those that waited for this request's prompt, which has been computed or given up."""
        return self.held_back.pop(sampling_of(request).parent, [])

    def done_with(self, request: RequestState) -> list[RequestState] | None:
        """All continuations of the prompt, if this finished one was the last."""
        parent = sampling_of(request).parent
        if all(sibling.finish_reason for sibling in self._unfinished[parent]):
            return self._unfinished.pop(parent)
        return None
