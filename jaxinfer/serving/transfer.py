"""Movement of KV entries: transfers, and the hand-off of a request from one leg to the next.

The states of a hand-off from leg to leg, and the fields of the request in each state:

| state | fields set | pages there | pages here | place and status |
|---|---|---|---|---|
| the first leg runs | hold | none | hold | there: running |
| room is reserved ahead | hold, incoming | incoming | hold | there: running |
| the leg has ended | exported | none, or incoming | exported | unrouted, or here: waiting |
| its KV is fetched | exported, hold | hold | exported | here: importing |
| the next leg runs | hold | hold | none | here: running |

"There" is the instance of the ended leg, "here" is the instance of the next leg. ``sent`` counts
the KV entries whose transfer here has started, or which the prefix cache here had. ``transfers``
counts the transfers that have not landed. A request whose beginning is fetched from a prefix cache
begins in the third state.

Pages are freed as follows:

- ``hold``: at the request's end, at its preemption, or if the instance is lost.
- ``exported``: by ``_arrive``, once all KV has landed; at the request's end; or by the loop, if no
  instance fetches the KV and nothing else can continue (it is then recomputed).
- ``exported``, if it is what a request fetches from a prefix cache: also if running requests of
  the instance need the pages before the transfer has started. Then it fetches nothing.
- ``incoming``: when an ``epoch`` ends, when legs change, or when running requests of the instance
  need the pages. Entries that were already sent are then void, and ``sent`` is 0 again.

Pages stay pinned until the last step or transfer that uses them is done.

Moves of slices of KV heads within an instance are separate (``features/slice_moves.py``).
"""

from collections.abc import Mapping

from jaxinfer.serving.batch import Batch, Transfer
from jaxinfer.serving.features.slice_moves import SliceMoves
from jaxinfer.serving.instance import Instance
from jaxinfer.serving.kv_shards import HeldPages
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.system import MoveSlices
from jaxinfer.serving.views import HandOffRule
from jaxinfer.serving.world import World

# An instance's name, and the pages there.
End = tuple[str, HeldPages]
_AHEAD: tuple[HandOffRule, ...] = ("per_chunk", "per_segment")


class HandOffs:
    """Takes requests from leg to leg, by the rule that the leg names.

    Attributes:
        moving: transfers that have started and not ended.
        slices: moves of slices of KV heads within an instance.
    """

    def __init__(self, world: World, instances: Mapping[str, Instance]) -> None:
        self.moving: list[Transfer] = []
        self.slices = SliceMoves(self._send_slices)
        self._world = world
        self._instances = instances

    def end_leg(self, request: RequestState) -> None:
        """Take the request out of its instance; its pages stay until they are fetched."""
        leg = request.legs.pop(0)
        source = self._instances[leg.instance]
        source.remove(request)
        assert request.hold
        assert request.pending == 0
        assert request.launched == request.computed
        if request.slice_move:
            request.hold.drop_copies()
        request.slice_copy = request.slice_move = None
        if request.computed:
            if request.metrics.cut is None:
                request.metrics.cut = request.computed
            request.exported = (leg.instance, request.hold)
            source.num_exported += 1
            first = len(request.output_token_ids) == 1 and request.metrics.received is None
            request.hands_over_first = first
        else:
            request.hold.release()
        request.hold = None
        if request.legs:
            self.start_leg(request, leg.hand_off)

    def fetch_cached(self, request: RequestState, source: Instance) -> None:
        """Let the first leg's instance fetch the part of the prompt that ``source`` has cached.

        The effect is the same as if a leg on ``source`` had computed these entries. Call
        ``has_more`` first: it returns whether there is anything to fetch.
        """
        cached = source.cached_prefix(request, request.legs[0])
        hold = source.kv.hold_cached(cached)
        request.computed = request.launched = hold.num_cached
        counts = request.metrics.num_cached_tokens is None
        request.metrics.add_cached(request.computed)
        request.exported = (source.name, hold)
        source.num_exported += 1
        source.kv.reserved[hold] = lambda: self._do_without(request, counts)

    def has_more(self, request: RequestState, source: Instance) -> bool:
        """Tell whether a request without KV would fetch pages from the cache of ``source``."""
        leg = request.legs[0]
        dest = self._instances[leg.instance]
        if source is dest or request.exported:
            return False
        here = len(dest.cached_prefix(request, leg)) * dest.page_size
        return len(source.cached_prefix(request, leg)) * source.page_size > here

    def _do_without(self, request: RequestState, counts: bool) -> None:
        """Fetch nothing: the pages are needed where they are.

        Args:
            counts: whether the request's figures count what it would have fetched.
        """
        self.release_export(request)
        if counts:
            request.metrics.num_cached_tokens = None
        if request.legs:
            dest = self._instances[request.legs[0].instance]
            dest.waiting.void_kv(request)
            dest.kv.on_free()  # It needs no transfer any more.
        else:
            request.void_kv()

    def copy_out(self, request: RequestState, source: Instance, dest: Instance) -> None:
        """Send the cached pages of a request that ends to a cache that lacks them, if it has room.

        The pages at both ends are given up at once, and become free when the transfer has ended.
        """
        ours, theirs = source.kv, dest.kv
        if not (ours.cache and theirs.cache and request.prompt_token_ids):
            return
        found = ours.cache.match(
            request.page_digests(ours.page_size, request.computed // ours.page_size)
        )
        stop = len(found) * ours.page_size // theirs.page_size * theirs.page_size
        there = theirs.cache.match(request.page_digests(theirs.page_size, stop // theirs.page_size))
        request.sent = len(there) * theirs.page_size
        if request.sent < stop and (room := theirs.reserve(stop, there)):
            room.session = request.session
            pages = ours.hold_cached(found)
            ends = (source.name, pages), (dest.name, room)
            transfer = self._note(request, *ends, request.sent, stop)
            transfer.is_copy = True
            self._world.start_transfer(transfer)
            pages.release()
            room.release()

    def start_leg(self, request: RequestState, rule: HandOffRule = "on_demand") -> None:
        """Put the request into its first leg's queue, or start the leg if its KV is there."""
        leg = request.legs[0]
        dest = self._instances[leg.instance]
        if request.incoming and not (
            request.incoming.kv is dest.kv
            and dest.can_import
            # A leg that was cut short may have computed less than the cache there has.
            and request.sent <= request.computed
            and request.incoming.grow(request.known_until(leg))
        ):
            request.drop_incoming()
        if request.exported and request.exported[0] == dest.name:
            dest.waiting.appendleft(request)
            return
        # It was cut before anything was computed, so there is nothing to send.
        if not request.exported:
            request.drop_incoming()
            rule = "on_demand"
        pushed = rule == "when_room"
        if (pushed or rule == "at_end") and not request.incoming:
            request.incoming = dest.reserve_ahead(request, leg, pushed)
        if request.incoming:
            del dest.kv.reserved[request.incoming]
            request.hold, request.incoming = request.incoming, None
            dest.importing[request.id] = request
            self.pull(request)
        else:
            if request.goes_first:
                dest.waiting.appendleft(request)
            else:
                dest.waiting.append(request)
            if pushed:
                dest.waiting.pushed[request.id] = request

    def pull(self, request: RequestState) -> None:
        """Send the KV that the next leg's instance still lacks; its pages are reserved."""
        assert request.hold
        assert request.exported
        if request.sent < request.computed:
            request.exported[1].kv.reserved.pop(request.exported[1], None)
            dest = request.legs[0].instance, request.hold
            transfer = self._note(request, request.exported, dest, request.sent, request.computed)
            self._world.start_transfer(transfer)
        elif not (request.transfers and any(t.dest_hold is request.hold for t in self.moving)):
            self._arrive(request)  # Transfers to an earlier destination are not waited for.

    def send_chunk(self, request: RequestState) -> None:
        """Send the KV that a step computed, and has not sent, to the next leg's instance."""
        leg = request.legs[0]
        if leg.hand_off not in _AHEAD or request.transfers or request.sent >= request.computed:
            return
        room = self._room_ahead(request, request.computed)
        if room and request.sent < request.computed:
            assert request.hold
            here, there = (leg.instance, request.hold), (request.legs[1].instance, room)
            transfer = self._note(request, here, there, request.sent, request.computed)
            self._world.start_transfer(transfer)

    def send_along(self, batch: Batch) -> None:
        """Let a step send the KV of ``per_segment`` legs while it computes it."""
        for row in batch.rows:
            request = row.request
            if request.legs[0].hand_off != "per_segment":
                continue
            if len(request.output_token_ids) + request.pending == request.max_tokens:
                continue  # The request ends with this step.
            stop = row.start + row.count
            room = self._room_ahead(request, stop)
            if room and request.sent < stop:
                here, there = (batch.instance, row.hold), (request.legs[1].instance, room)
                batch.transfers.append(self._note(request, here, there, request.sent, stop))

    def _room_ahead(self, request: RequestState, num_tokens: int) -> HeldPages | None:
        """Reserve pages at the next leg's instance while this leg runs, if it has enough."""
        if len(request.legs) < 2 or request.legs[0].instance == request.legs[1].instance:
            return None
        if request.incoming is None:
            dest = self._instances[request.legs[1].instance]
            request.incoming = dest.reserve_ahead(request, request.legs[1])
        # A leg that continues after its prompt outgrows the reserved pages.
        fits = request.incoming and request.incoming.grow(num_tokens)
        return request.incoming if fits else None

    def _send_slices(self, request: RequestState, start: int, stop: int, move: MoveSlices) -> None:
        assert request.hold
        here = request.legs[0].instance, request.hold
        self._world.start_transfer(self._note(request, here, here, start, stop, move))

    def done(self, transfer: Transfer, end: float) -> None:
        """Commit a transfer that has finished at ``end``, unless its epoch is over."""
        request, dest = transfer.request, transfer.dest_hold
        if transfer.is_copy:
            size = dest.kv.page_size
            dest.keep(request.page_digests(size, transfer.stop // size))
        if not self._end(transfer):
            return
        if transfer.slice_move:
            self.slices.arrived(transfer, transfer.slice_move)
            return
        if request.slice_move:
            self.slices.send_rest(request)
        elif request.exported and request.hold:
            first = request.hands_over_first
            self.pull(request)
            if first and not request.exported:
                request.metrics.received = end

    def forget(self, instance: str) -> None:
        """Cancel all transfers from or to a lost instance."""
        for transfer in list(self.moving):
            if instance not in (transfer.source, transfer.dest) or not self._end(transfer):
                continue
            if transfer.source != instance and transfer.request.slice_move:
                self.slices.send_rest(transfer.request)  # It waited for this transfer.

    def _end(self, transfer: Transfer) -> bool:
        """End a transfer, and tell whether it was still needed."""
        self.moving.remove(transfer)
        for hold in (transfer.source_hold, transfer.dest_hold):
            hold.transfers -= 1
            hold.unpin()
        if transfer.epoch != transfer.request.epoch:
            return False
        transfer.request.transfers -= 1
        return True

    def release_export(self, request: RequestState) -> None:
        """Free the pages of the last leg once they have been fetched, or are no longer needed."""
        if request.exported:
            name, hold = request.exported
            request.exported = None
            self._instances[name].num_exported -= 1
            hold.release()

    def leave_tier(self, request: RequestState) -> None:
        """Give up a request's KV if a tier has it.

        Systems do not see tiers, and only some instances can fetch from them.
        """
        if request.exported and not self._instances[request.exported[0]].options.computes:
            self.release_export(request)
            request.void_kv()

    def _arrive(self, request: RequestState) -> None:
        self.release_export(request)
        request.sent = 0
        request.hands_over_first = False
        dest = self._instances[request.legs[0].instance]
        del dest.importing[request.id]
        dest.keep_prefix(request)
        dest.taking_part.add(request)

    def _note(
        self,
        request: RequestState,
        source: End,
        dest: End,
        start: int,
        stop: int,
        move: MoveSlices | None = None,
    ) -> Transfer:
        """Record a transfer of unsent KV or of slices."""
        if not move:
            request.sent = stop
        request.transfers += 1
        for _, hold in (source, dest):
            hold.transfers += 1
            hold.pin()
        transfer = Transfer(
            request=request,
            epoch=request.epoch,
            source=source[0],
            dest=dest[0],
            source_hold=source[1],
            dest_hold=dest[1],
            start=start,
            stop=stop,
            requested=self._world.now(),
            slice_move=move,
        )
        self.moving.append(transfer)
        return transfer
