"""Several continuations of one prompt: which wait for another, and when all are done."""

import math
from collections.abc import Iterable, Iterator, Sized

from jaxinfer.errors import JaxinferError
from jaxinfer.runtime.stage.sampling_inputs import sampling_of
from jaxinfer.serving.request_state import RequestState


class Continuations:
    """The requests of one run, grouped by the request that they were made from.

    With prefix caching, the others wait until the first has computed a prompt of at least one
    full page, and then go to the head of the queue, before its pages are evicted.

    Args:
        requests: as ``LLM.make_requests`` makes them, all continuations of one prompt in a row.
            What has a length is read at once, anything else as there is room.
        page_size: of the prefix cache, or None without one.
        most: there is room while fewer requests are unfinished.

    Attributes:
        more_to_come: whether ``requests`` may have some that have not been read.
        num_parents: requests as the user counts them, of those that have been read.
        held_back: those that wait for another, by the request that they were made from.
    """

    def __init__(
        self, requests: Iterable[RequestState], page_size: int | None, most: float
    ) -> None:
        self.more_to_come = True
        self.num_parents = 0
        self.held_back: dict[str, list[RequestState]] = {}
        self._groups = _groups(requests)
        self._page_size = page_size
        self._most = math.inf if isinstance(requests, Sized) else most
        self._num_unfinished = 0
        self._unfinished: dict[str, list[RequestState]] = {}
        # All that grows with the requests that have ended.
        self._parents: set[str] = set()

    def read(self, at_least_one: bool) -> list[RequestState]:
        """Requests for which there is room; those of ``held_back`` are among them.

        Args:
            at_least_one: whether there is room or not, if any are left.

        Raises:
            JaxinferError: two requests have one id, one has been in a run, or continuations of one
                prompt do not follow one another.
        """
        found: list[RequestState] = []
        while self.more_to_come and (
            self._num_unfinished < self._most or (at_least_one and not found)
        ):
            group = next(self._groups, None)
            if group is None:
                self.more_to_come = False
            else:
                self._add(group)
                found += group
        return found

    def _add(self, group: list[RequestState]) -> None:
        first, *others = group
        parent = sampling_of(first).parent
        if parent in self._parents and first.id != parent:
            raise JaxinferError(
                f"request {first.id!r} does not follow the other continuations of {parent!r}, or "
                "two requests have this id"
            )
        ids = {request.id for request in group}
        if parent in self._parents or len(ids) < len(group):
            raise JaxinferError(f"two requests have the id {first.id!r}")
        self._parents.add(parent)
        self._unfinished[parent] = group
        self._num_unfinished += len(group)
        self.num_parents += 1
        if self._page_size and others and first.prompt_len > self._page_size:
            self.held_back[parent] = others
            for request in others:
                request.goes_first = True

    def released_by(self, request: RequestState) -> list[RequestState]:
        """Release those that waited for this request's prompt, which was computed or given up."""
        return self.held_back.pop(sampling_of(request).parent, [])

    def done_with(self, request: RequestState) -> list[RequestState] | None:
        """Continuations of the prompt, if this finished one was the last."""
        self._num_unfinished -= 1
        parent = sampling_of(request).parent
        if all(sibling.finish_reason for sibling in self._unfinished[parent]):
            return self._unfinished.pop(parent)
        return None


def _groups(requests: Iterable[RequestState]) -> Iterator[list[RequestState]]:
    """Group requests by parent; no group waits for the next one's first to be known as complete."""
    group: list[RequestState] = []
    for request in requests:
        if not isinstance(request, RequestState):
            raise JaxinferError(f"request {request!r} is none that make_requests has made")
        if request.epoch or request.legs or request.computed:
            raise JaxinferError(f"request {request.id!r} is used up: make_requests makes new ones")
        sampling = sampling_of(request)
        if group and sampling.parent != sampling_of(group[0]).parent:
            yield group
            group = []
        group.append(request)
        if len(group) == sampling.params.n:
            yield group
            group = []
    if group:
        yield group
