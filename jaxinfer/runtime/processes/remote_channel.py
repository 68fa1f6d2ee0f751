"""Moves slabs of KV entries between instances of which one at least is in another process."""

import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from queue import SimpleQueue

from jaxinfer.errors import JaxinferError
from jaxinfer.runtime.kv.channel import Landed, Post, starts_of
from jaxinfer.runtime.kv.checksums import compare
from jaxinfer.runtime.kv.outcome import End, Failed, StepEnd
from jaxinfer.runtime.kv.slab import SLAB_TOKENS
from jaxinfer.runtime.kv.stage_pair import RemoteLane, RemoteSlab
from jaxinfer.runtime.processes.kv_endpoint import LaneAnswer
from jaxinfer.runtime.processes.messages import (
    CarrierName,
    Checked,
    Drop,
    Offer,
    Offered,
    OpenLane,
    Place,
    Pull,
    Pulled,
    SlabFailed,
)
from jaxinfer.runtime.processes.process_group import Side
from jaxinfer.runtime.processes.remote_worker import ProcessLost
from jaxinfer.serving.batch import Transfer

# A process that has ended may be missed as a source before it is known why.
EXPLAINED_S = 1.0
# Of slabs: none is ever used again, so that what comes late is known for it.
_numbers = count()


class RemoteChannel:
    """The way between two instances, at least one in another process; see ``Channel``.

    Args:
        ends: names of the two; ``sides``: the processes that have them.
        verify: compare checksums of what was sent and what lies in the destination's pages.
        carriers: at least one, from which the probe is to choose.

    Attributes:
        by: the carrier in use; ``failed``: carriers that the probe has failed with, and why.
        waits_for: None: a process that says nothing, and a slab that does not come, are given up
            where they are waited for.
    """

    waits_for: tuple[str, float] | None = None

    def __init__(
        self,
        ends: tuple[str, str],
        sides: tuple[Side, Side],
        lanes: Sequence[RemoteLane],
        verify: bool,
        carriers: Sequence[CarrierName],
    ) -> None:
        self.lanes = lanes
        self.by, self._carriers = carriers[0], carriers
        self.failed: dict[CarrierName, str] = {}
        self.token_bytes = sum(lane.token_bytes for lane in lanes)
        self._ends, self._verify = ends, verify
        self._source, self._dest = sides
        # Slabs that have not been placed or, where that is asked for, not been checked.
        self._slabs: dict[int, RemoteSlab] = {}
        self._probing: dict[int, RemoteLane] = {}
        self._probed: SimpleQueue[Pulled | SlabFailed] = SimpleQueue()
        self._post: Post = lambda posted: None
        # Of what a slab has come to: answers come in threads of both sides.
        self._lock = threading.Lock()
        for lane in lanes:
            form, (source, dest) = lane.form, ends
            send = OpenLane(lane.source_end, source, lane.source_shard, form, True, verify)
            self._source.open(send, self._hear)
            take = OpenLane(lane.dest_end, dest, lane.dest_shard, form, False, verify)
            self._dest.open(take, self._hear)
        for end, side in zip(ends, sides, strict=True):
            side.on_loss(partial(self._lose, end))

    def probe(self, names: str) -> float:
        """10^9 bytes per second of the slowest lane, by the quickest carrier there is.

        Raises:
            JaxinferError: a known slab does not arrive by any of them, or arrives changed.
        """
        rates: dict[CarrierName, float] = {}
        for name in self._carriers:
            self.by = name
            try:
                rates[name] = min(self._probe(lane, names) for lane in self.lanes)
            except JaxinferError as error:
                self.failed[name] = str(error)
        if not rates:
            raise JaxinferError("; ".join(self.failed.values()))
        self.by = max(rates, key=lambda name: rates[name])
        return rates[self.by]

    def _probe(self, lane: RemoteLane, names: str) -> float:
        seconds = []
        for _ in range(3):  # The first pays for set-up.
            number = next(_numbers)
            self._probing[number] = lane
            offer = Offer(lane.source_end, number, None, 0, SLAB_TOKENS, None, self.by)
            try:
                self._source.do(offer)
                while (answer := self._probed.get()).slab != number:
                    pass  # Of one that was given up.
            except ProcessLost as error:
                raise JaxinferError(f"{names}: {error}") from None
            finally:
                del self._probing[number]
            if isinstance(answer, SlabFailed):
                raise JaxinferError(f"{names}: {self._blame(answer)[1]}")
            seconds.append(answer.end - answer.start)
        return lane.token_bytes * SLAB_TOKENS / min(seconds) / 1e9

    def num_slabs(self, transfer: Transfer) -> int:
        """Return how many slabs of a transfer will land."""
        return len(starts_of(transfer)) * len(self.lanes)

    def send(
        self, transfer: Transfer, post: Post, stage: int | None = None, after: End | None = None
    ) -> None:
        """Start moving; ``post`` gets each slab as it lands. Returns at once."""
        if post != self._post:
            self._begin(post)
        there, here = (after, None) if isinstance(after, StepEnd) else (None, after)
        for start in starts_of(transfer):
            for lane in self.lanes:
                if stage is None or lane.source_shard == stage:
                    stop = min(start + SLAB_TOKENS, transfer.stop)
                    slab = RemoteSlab(next(_numbers), transfer, lane, start, stop)
                    with self._lock:
                        self._slabs[slab.number] = slab
                    table = transfer.source_hold.tables[lane.source_shard][0]
                    offer = Offer(lane.source_end, slab.number, table, start, stop, there, self.by)
                    try:
                        self._source.do(offer, here)
                    except ProcessLost:
                        self._forget(slab)
                        raise

    def _begin(self, post: Post) -> None:
        """Begin a run; forget slabs that nobody takes, from a run that was broken off."""
        self._post = post
        with self._lock:
            left = list(self._slabs.values())
        for slab in left:
            self._forget(slab)

    def place(self, landed: Landed, post: Post) -> None:
        """Write a slab to its pages; ``post`` hears of it if it is not what was sent."""
        slab = landed.slab
        assert isinstance(slab, RemoteSlab)
        if not self._verify:
            self._take(slab)
        table = slab.transfer.dest_hold.tables[slab.lane.dest_shard][0]
        self._dest.do(Place(slab.lane.dest_end, slab.number, table, slab.start, slab.stop))

    def drop(self, landed: Landed) -> None:
        """Forget a slab that is not to be placed."""
        assert isinstance(landed.slab, RemoteSlab)
        self._forget(landed.slab)

    def close(self) -> None:
        """The processes end by themselves."""

    def _hear(self, answer: LaneAnswer) -> None:
        if answer.slab in self._probing:
            self._hear_probe(answer)
            return
        with self._lock:
            slab = self._slabs.get(answer.slab)
            if slab and isinstance(answer, Pulled):
                slab.is_pulled = True
        match answer:
            case Offered(_, number, address, checksum_LT) if slab:
                slab.checksum_LT = checksum_LT
                self._pull(Pull(slab.lane.dest_end, number, self.by, address))
            case Pulled(_, _, start, end) if slab:
                self._post(Landed(slab, None, start, end))
            case Pulled(lane, number):
                with suppress(ProcessLost):  # Given up while it was on its way.
                    self._dest.do(Drop(lane, number, self.by))
            case Checked() if slab:
                self._check(slab, answer)
            case SlabFailed(_, _, by_source) if slab or not by_source:
                if slab:
                    self._forget(slab)
                instance, why = self._blame(answer)
                self._post(Failed(instance, ProcessLost(why)))

    def _blame(self, failed: SlabFailed) -> tuple[str, str]:
        """Return the instance to blame and the reason: that its process has ended, if it has."""
        instance, side = list(zip(self._ends, (self._source, self._dest), strict=True))[
            not failed.by_source
        ]
        return instance, side.why_lost(EXPLAINED_S) or failed.line

    def _hear_probe(self, answer: LaneAnswer) -> None:
        match answer:
            case Offered(_, number, address):
                dest_end = self._probing[number].dest_end
                self._pull(Pull(dest_end, number, self.by, address, known=True))
            case Pulled() | SlabFailed():
                self._probed.put(answer)

    def _pull(self, message: Pull) -> None:
        try:
            self._dest.do(message)
        except ProcessLost as error:
            self._lose(self._ends[1], str(error))

    def _check(self, slab: RemoteSlab, answer: Checked) -> None:
        self._take(slab)
        assert slab.checksum_LT is not None
        lane, tokens = slab.lane, (slab.start, slab.stop)
        try:
            compare(
                slab.transfer,
                tokens,
                lane.form.first,
                lane.dest_shard,
                lane.page_size,
                slab.checksum_LT,
                answer.checksum_LT,
            )
        except JaxinferError as error:
            self._post(Failed(self._ends[1], error))

    def _lose(self, instance: str, why: str) -> None:
        """Give up what is on its way when one of the two is no more.

        What has been pulled needs the source no more.
        """
        with self._lock:
            lost = [s for s in self._slabs.values() if instance == self._ends[1] or not s.is_pulled]
        for slab in lost:
            self._forget(slab)
        self._post(Failed(instance, ProcessLost(why)))
        by_source = instance == self._ends[0]
        for number, lane in list(self._probing.items()):
            self._probed.put(SlabFailed(lane.source_end, number, by_source, why))

    def _take(self, slab: RemoteSlab) -> bool:
        """Count it as done with; whether it was not."""
        with self._lock:
            return self._slabs.pop(slab.number, None) is not None

    def _forget(self, slab: RemoteSlab) -> None:
        if not self._take(slab):
            return
        for side, end in ((self._source, slab.lane.source_end), (self._dest, slab.lane.dest_end)):
            with suppress(ProcessLost):  # Nothing is left there then.
                side.do(Drop(end, slab.number, self.by))
