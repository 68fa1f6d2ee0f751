"""An instance's queue, which knows what its requests are still to compute, and to hold."""

from collections import deque

from jaxinfer.serving.request_state import RequestState


class Waiting(deque[RequestState]):
    """Requests in their order.

    Args:
        instance: whose queue it is.

    Attributes:
        prompt_tokens_left: prompt tokens that all of them have still to compute.
        pages: of all of them, once they are admitted, but for those whose KV lies here already.
        pushed: by id, those of them whose KV is to come as soon as there is room (``when_room``).
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
        """Take a request out, with the same entries of KV and leg as when it came."""
        super().remove(request)
        self._discount(request)

    def void_kv(self, request: RequestState) -> None:
        """Forget the KV of a request in the queue."""
        self._discount(request)
        request.void_kv()
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
