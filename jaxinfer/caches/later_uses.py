"""Uses of pages by requests that are known before they arrive."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from jaxinfer.serving.request_state import RequestState

# Negative time and number of a use, so that the last of several is the next one.
_Use = tuple[float, int, RequestState]
NEVER = -math.inf, 0


class LaterUses:
    """Uses of pages by requests that are known before they arrive, in the order of arrival.

    Args:
        page_sizes: the instances' page sizes.
        users: for each tier, the instances whose requests fetch pages from it.

    Attributes:
        known: ids of the requests that were known when the run began.
    """

    def __init__(
        self, page_sizes: Iterable[int], users: Mapping[str, Collection[str]] | None = None
    ) -> None:
        self._users = users or {}
        self._uses: dict[int, dict[bytes, list[_Use]]] = {size: {} for size in page_sizes}
        self.known: list[str] = []

    def begin(self, requests: Sequence[RequestState]) -> None:
        """Replace all recorded uses by those of these requests."""
        self.known = [request.id for request in requests]
        for size, uses in self._uses.items():
            uses.clear()
            for number, request in enumerate(requests):
                for digest in _digests(request, size):
                    uses.setdefault(digest, []).append((-request.arrival, -number, request))
            for each in uses.values():
                each.sort()

    def ended(self, request: RequestState) -> None:
        """Forget the page uses of a request that has ended."""
        for size, uses in self._uses.items():
            for digest in _digests(request, size):
                here = uses.get(digest, [])
                # It is one of the next.
                for index in range(len(here) - 1, -1, -1):
                    if here[index][2] is request:
                        del here[index]
                        break
                if digest in uses and not here:
                    del uses[digest]

    def next_use(self, digest: bytes, page_size: int, instance: str) -> tuple[float, int]:
        """Return the negative time and number of a page's next use on an instance."""
        here = self._users.get(instance, (instance,))
        for time, number, request in reversed(self._uses[page_size].get(digest, ())):
            legs = request.legs
            to_come = legs[1:] if request.hold else legs
            if not legs or any(leg.instance in here for leg in to_come):
                return time, number
        return NEVER


def _digests(request: RequestState, page_size: int) -> Sequence[bytes]:
    """Return the digests of the prompt's pages that a cache can spare the request."""
    if not request.prompt_token_ids:
        return ()
    return request.page_digests(page_size, (request.prompt_len - 1) // page_size)
