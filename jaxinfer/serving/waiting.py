"""An instance's queue, with running totals of prompt tokens and pages."""

from collections import deque
from collections.abc import Callable

from jaxinfer.serving.request_state import RequestState


class Waiting(deque[RequestState]):
    """The waiting requests in their order.

    Args:
        instance: the queue's instance.

    Attributes:
        prompt_tokens_left: number of prompt tokens that all of them still have to compute.
        pages: number of pages that all of them will need, without those whose KV is already here.
        pushed: requests whose KV is sent as soon as there is room (``when_room``), by id.
    """

    def __init__(self, instance: str, page_size: int) -> None:
        super().__init__()
        self._instance, self._page_size = instance, page_size
        self._pages: dict[str, int] = {}
        self.prompt_tokens_left = self.pages = 0
        self.pushed: dict[str, RequestState] = {}

    def append(self, request: RequestState) -> None:
        """Put a request at the end."""
        self._count(request)
        super().append(request)

    def appendleft(self, request: RequestState) -> None:
        """Put a request at the head."""
        self._count(request)
        super().appendleft(request)

    def remove(self, request: RequestState) -> None:
        """Remove a request, whose KV entries and leg are the same as when it was added."""
        super().remove(request)
        self._discount(request)

    def void_kv(self, request: RequestState) -> None:
        """Discard the KV of a request in the queue."""
        self.change(request, RequestState.void_kv)

    def change(self, request: RequestState, how: Callable[[RequestState], None]) -> None:
        """Let ``how`` change the KV entries of a request in the queue."""
        self._discount(request)
        how(request)
        self._count(request)

    def _count(self, request: RequestState) -> None:
        held = request.held_by == self._instance
        pages = self._pages[request.id] = 0 if held else -(-request.num_known // self._page_size)
        self.pages += pages
        self.prompt_tokens_left += request.prompt_tokens_left

    def _discount(self, request: RequestState) -> None:
        self.pushed.pop(request.id, None)
        self.pages -= self._pages.pop(request.id)
        self.prompt_tokens_left -= request.prompt_tokens_left
