"""An instance's queue, which knows how much of its prompts is left to compute."""

from collections import deque

from jaxinfer.serving.request_state import RequestState


class Waiting(deque[RequestState]):
    """Requests in their order.

    Attributes:
        prompt_tokens_left: prompt tokens that all of them have still to compute.
        pushed: by id, those of them whose KV is to come as soon as there is room (``when_room``).
    """

    def __init__(self) -> None:
        super().__init__()
        self.prompt_tokens_left = 0
        self.pushed: dict[str, RequestState] = {}

    def append(self, request: RequestState) -> None:
        """Put a request at the end."""
        self.prompt_tokens_left += request.prompt_tokens_left
        super().append(request)

    def appendleft(self, request: RequestState) -> None:
        """Put a request at the head."""
        self.prompt_tokens_left += request.prompt_tokens_left
        super().appendleft(request)

    def remove(self, request: RequestState) -> None:
        """Take a request out, with the same KV and leg as when it came."""
        super().remove(request)
        self.pushed.pop(request.id, None)
        self.prompt_tokens_left -= request.prompt_tokens_left

    def void_kv(self, request: RequestState) -> None:
        """Forget the KV of a request in the queue."""
        self.pushed.pop(request.id, None)
        self.prompt_tokens_left -= request.prompt_tokens_left
        request.void_kv()
        self.prompt_tokens_left += request.prompt_tokens_left
