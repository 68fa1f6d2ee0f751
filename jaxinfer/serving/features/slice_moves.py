"""Moves of slices of KV heads within an instance, of requests that go on meanwhile.

A move takes two transfers: of the pages that are full, while the request goes on (``slice_copy``),
and of the rest once nothing uses its pages (``slice_move``).
"""

from collections.abc import Callable

from jaxinfer.errors import JaxinferError
from jaxinfer.serving.batch import Transfer
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.system import MoveSlices


class SliceMoves:
    """Begins moves that a system asks for, and takes each to its end.

    Args:
        send: starts the transfer of a request's KV entries from one to another, of a move's slices.

    Attributes:
        num_begun: moves that have begun; ``num_without_room``: that had no room to.
        num_at_once: moves asked for while another one of their request was under way.
    """

    def __init__(self, send: Callable[[RequestState, int, int, MoveSlices], None]) -> None:
        self._send = send
        self.num_begun = self.num_without_room = self.num_at_once = 0

    def ask(self, request: RequestState, move: MoveSlices) -> None:
        """Begin to move slices of KV heads, with their full pages; given up without room."""
        hold = request.hold
        assert hold
        if request.slice_move or hold.copies:
            self.num_at_once += 1
            return
        if hold.kv.cache:
            raise JaxinferError(f"system asks for {move}, not possible with prefix caching")
        if not move.moves or not hold.can_move(move.moves):
            raise JaxinferError(f"system asks for {move}, but the slices are not there to move")
        if not hold.copy_slices(move.moves):
            self.num_without_room += 1
            return
        self.num_begun += 1
        full = request.computed // hold.kv.page_size * hold.kv.page_size
        if full:
            request.slice_copy = move
            self._send(request, 0, full, move)
        else:
            self._pause_for(request, move, 0)

    def _pause_for(self, request: RequestState, move: MoveSlices, copied: int) -> None:
        """Send the rest, past ``copied`` KV entries, as soon as nothing uses the pages."""
        request.slice_copy, request.slice_move = None, move
        request.slices_copied = copied
        self.send_rest(request)

    def send_rest(self, request: RequestState) -> None:
        """Send the rest of slices that move, if nothing uses the pages."""
        move, hold = request.slice_move, request.hold
        assert move
        assert hold
        if hold.users:
            return
        if request.slices_copied < request.computed:
            self._send(request, request.slices_copied, request.computed, move)
        else:
            _take_copies(request, move)

    def arrived(self, transfer: Transfer, move: MoveSlices) -> None:
        """The first part of a move has ended, or the second."""
        request, here = transfer.request, transfer.dest_hold is transfer.request.hold
        if here and request.slice_copy:
            self._pause_for(request, move, transfer.stop)
        elif here and request.slice_move:
            _take_copies(request, move)
        else:
            transfer.dest_hold.drop_copies()  # The leg has ended meanwhile.


def _take_copies(request: RequestState, move: MoveSlices) -> None:
    assert request.hold
    request.hold.take_copies(move.moves)
    request.slice_move = None
