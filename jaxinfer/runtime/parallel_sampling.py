"""Several continuations of one prompt: which of them wait, and when all are done."""

import math
from collections.abc import Iterable, Iterator, Sized

from jaxinfer.errors import JaxinferError
from jaxinfer.runtime.stage.sampling_inputs import sampling_of
from jaxinfer.serving.request_state import RequestState


class Continuations:
    """The requests of one run, grouped by the user's request that they belong to.

    With prefix caching, the other continuations wait until the first has computed a prompt of at
    least one full page. They then go to the head of the queue, before the prompt's pages are
    evicted.

    Args:
        requests: requests from ``LLM.make_requests``; all continuations of one prompt follow one
            another. A sequence is read at once, an iterator as there is room.
        page_size: page size of the prefix cache, or None without one.
        most: number of unfinished requests at which there is no room for more.

    Attributes:
        more_to_come: whether ``requests`` may have some that have not been read.
        num_parents: number of the user's requests that have been read.
        held_back: requests that wait for their first continuation, by the user's request.
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
        """Read requests for which there is room, including those that are then held back.

        Args:
            at_least_one: read a request even without room, if any are left.

        Raises:
            JaxinferError: two requests have one id, one has already run, or continuations of one
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
        """Release requests that waited for this request's prompt, now computed or given up."""
        return self.held_back.pop(sampling_of(request).parent, [])

    def done_with(self, request: RequestState) -> list[RequestState] | None:
        """Return all continuations of a prompt if this finished one was the last, else None."""
        self._num_unfinished -= 1
        parent = sampling_of(request).parent
        if all(sibling.finish_reason for sibling in self._unfinished[parent]):
            return self._unfinished.pop(parent)
        return None


def _groups(requests: Iterable[RequestState]) -> Iterator[list[RequestState]]:
    """Group requests by parent; a complete group is yielded without reading the next one."""
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
