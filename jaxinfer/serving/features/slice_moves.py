"""Moves of slices of KV heads within an instance, while their requests continue.

A move takes two transfers: one of full pages, during which the request continues (``slice_copy``),
and one of the rest, once no step uses the pages (``slice_move``).
"""

from collections.abc import Callable

from jaxinfer.errors import JaxinferError
from jaxinfer.serving.batch import Transfer
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.system import MoveSlices


class SliceMoves:
    """Starts the moves that a system asks for, and completes them.

    Args:
        send: starts the transfer of KV entries of a move's slices, with the request and the first
            and last entry.

    Attributes:
        num_begun: number of moves that have begun.
        num_without_room: number of moves that were dropped because there was no room.
        num_at_once: number of moves asked for while another move of the same request was under way.
    """

    def __init__(self, send: Callable[[RequestState, int, int, MoveSlices], None]) -> None:
        self._send = send
        self.num_begun = self.num_without_room = self.num_at_once = 0

    def ask(self, request: RequestState, move: MoveSlices) -> None:
        """Begin to move slices of KV heads by sending their full pages; do nothing without room."""
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
        """Pause the request and send all after ``copied`` KV entries once pages are unused."""
        request.slice_copy, request.slice_move = None, move
        request.slices_copied = copied
        self.send_rest(request)

    def send_rest(self, request: RequestState) -> None:
        """Send the rest of the moving slices' entries, if no step or transfer uses the pages."""
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
        """Continue a move after its first transfer has ended, or complete it after its second."""
        request, here = transfer.request, transfer.dest_hold is transfer.request.hold
        if here and request.slice_copy:
            self._pause_for(request, move, transfer.stop)
        elif here and request.slice_move:
            _take_copies(request, move)
        else:
            transfer.dest_hold.drop_copies()  # The leg has ended since then.


def _take_copies(request: RequestState, move: MoveSlices) -> None:
    assert request.hold
    request.hold.take_copies(move.moves)
    request.slice_move = None
