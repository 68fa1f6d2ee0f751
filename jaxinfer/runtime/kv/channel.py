"""The one protocol by which KV moves between instances, over any kind of link.

A ``Channel`` joins two sides. A side is a process: the loop's own (``kv_endpoint.ThisProcess``), or
another one to which the same messages travel (``process_group.RemoteEndpoint``). Each side has an
end of every ``StagePair`` (``kv_endpoint.KVEndpoint``), and each end a thread that does what has to
be waited for. A transport (``transports``) takes a slab from end to end: ``device`` where both are
in the loop's process, ``host`` or ``transfer_server`` otherwise.

| step | thread | what it does | to blame |
|---|---|---|---|
| send | loop | tells the source to offer each slab of a transfer | source |
| gather | source (1) | launches the copy out of the pages, and its checksum | source |
| offer | source end | waits for the copy and the step that computes it; hands it over | source |
| hear Offered | source end (2) | tells the destination to pull | a lost process |
| pull | destination end (3) | waits for the slab; bytes are sent during this step | source |
| put | destination end (3) | puts it on the destination's devices, and waits | destination |
| hear Pulled | destination end (2, 3) | posts ``Landed`` to the loop | |
| hold back | loop | waits for as long as an emulated link would take | |
| place | loop | tells the destination to write it, or to drop it if the transfer is given up | |
| scatter | destination (1) | launches the copy into the pages, which are donated | destination |
| check | destination end | waits for the checksum of the pages, if verifying | destination |
| hear Checked | destination end (2) | compares it with the source's checksum | the run ends |
| free | loop | ``serving.transfer`` frees pages when all slabs are placed | |

1. The loop's thread. In another process, its main thread, which handles messages.
2. If the side is another process, the thread that reads its answers.
3. With ``device``, the source end's thread, because no bytes are sent between processes.

The loop's thread therefore launches work, but never waits. An end does its jobs in order, so slabs
of a pair arrive in the order in which they were sent. The transport holds a slab until it is
pulled. Then the destination's end holds it until it is placed or dropped. A slab that fails is
dropped on both sides. If a process is lost, it is to blame for all slabs that it has not passed on.
Slabs that were already pulled from it are still placed. ``waits_for`` lists the threads of this
process that wait for devices. The watchdog finds there whose devices hang.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from queue import SimpleQueue

from jaxinfer.errors import JaxinferError
from jaxinfer.runtime.kv.checksums import compare
from jaxinfer.runtime.kv.kv_endpoint import KVProcess
from jaxinfer.runtime.kv.kv_messages import (
    Checked,
    Drop,
    Offer,
    Offered,
    OpenEnd,
    Place,
    Pull,
    Pulled,
    SlabAnswer,
    SlabFailed,
    TransportName,
)
from jaxinfer.runtime.kv.outcome import End, Failed, ProcessLost, SlabLost
from jaxinfer.runtime.kv.slab import SLAB_TOKENS
from jaxinfer.runtime.kv.stage_pair import Slab, StagePair
from jaxinfer.serving.batch import Transfer

# A process that has ended may be noticed as a missing source before the reason is known.
EXPLAINED_S = 1.0
# Numbers of slabs. None is used twice, so that late answers can be recognised.
_numbers = count()


@dataclass(frozen=True)
class Landed:
    """A slab that has reached the destination's devices; times are by ``time.perf_counter``."""

    slab: Slab
    start: float
    end: float


Post = Callable[[Landed | Failed], None]


class Channel:
    """Moves slabs of KV from one instance to another; see above.

    Args:
        ends: names of the two instances.
        sides: processes of the two instances.
        pairs: all pairs of stages that have layers in common.
        verify: compare checksums of what was sent with what is in the destination's pages.
        transports: transports that the probe may choose from, at least one.

    Attributes:
        transport: transport in use.
        failed: transports that failed in the probe, with the reasons.
        sides: processes of source and destination.
        token_bytes: KV bytes per token.
    """

    def __init__(
        self,
        ends: tuple[str, str],
        sides: tuple[KVProcess, KVProcess],
        pairs: Sequence[StagePair],
        verify: bool,
        transports: Sequence[TransportName],
    ) -> None:
        self.pairs = pairs
        self.transport, self._transports = transports[0], transports
        self.failed: dict[TransportName, str] = {}
        self.token_bytes = sum(pair.token_bytes for pair in pairs)
        self._ends, self._verify = ends, verify
        self.sides = self._source, self._dest = sides
        # Slabs that have not been placed or, if transfers are verified, not been checked.
        self._slabs: dict[int, Slab] = {}
        self._probing: dict[int, StagePair] = {}
        self._probed: SimpleQueue[Pulled | SlabFailed] = SimpleQueue()
        self._post: Post = lambda posted: None
        # Guards the states of slabs, because answers arrive in threads of both sides.
        self._lock = threading.Lock()
        for pair in pairs:
            form, (source, dest) = pair.form, ends
            send = OpenEnd(pair.source_end, source, pair.source_shard, form, True, verify)
            self._source.open(send, self._hear)
            take = OpenEnd(pair.dest_end, dest, pair.dest_shard, form, False, verify)
            self._dest.open(take, self._hear)
        for end, side in zip(ends, sides, strict=True):
            side.on_loss(partial(self._lose, end))

    def probe(self, names: str) -> float:
        """Find the fastest transport, and return the GB/s of its slowest pair of stages.

        Raises:
            JaxinferError: a slab with known contents arrives unchanged over none of the transports.
        """
        rates: dict[TransportName, float] = {}
        for name in self._transports:
            self.transport = name
            try:
                rates[name] = min(self._probe(pair, names) for pair in self.pairs)
            except JaxinferError as error:
                self.failed[name] = str(error)
        if not rates:
            raise JaxinferError("; ".join(self.failed.values()))
        self.transport = max(rates, key=lambda name: rates[name])
        return rates[self.transport]

    def _probe(self, pair: StagePair, names: str) -> float:
        seconds = []
        for _ in range(3):  # The first one includes set-up.
            number = next(_numbers)
            self._probing[number] = pair
            offer = Offer(pair.source_end, number, None, 0, SLAB_TOKENS, None, self.transport)
            try:
                self._source.do(offer)
                while (answer := self._probed.get()).slab != number:
                    pass  # This answers a slab that was given up.
            except ProcessLost as error:
                raise JaxinferError(f"{names}: {error}") from None
            finally:
                del self._probing[number]
            if isinstance(answer, SlabFailed):
                raise JaxinferError(f"{names}: {self._blame(answer)[1]}")
            seconds.append(answer.ended - answer.began)
        return pair.token_bytes * SLAB_TOKENS / min(seconds) / 1e9

    def num_slabs(self, transfer: Transfer) -> int:
        """Return how many slabs of a transfer will land."""
        return len(starts_of(transfer)) * len(self.pairs)

    def send(
        self, transfer: Transfer, post: Post, stage: int | None = None, after: End | None = None
    ) -> None:
        """Start a transfer; ``post`` receives each slab as it lands. Returns at once.

        Args:
            stage: stage of the source whose layers are sent; by default all stages.
            after: event after which the KV exists, if a step still has to compute the KV.

        Raises:
            Exception: the source cannot launch the transfer, or is lost.
        """
        if post != self._post:
            self._begin(post)
        for start in starts_of(transfer):
            for pair in self.pairs:
                if stage is None or pair.source_shard == stage:
                    stop = min(start + SLAB_TOKENS, transfer.stop)
                    slab = Slab(next(_numbers), transfer, pair, start, stop)
                    with self._lock:
                        self._slabs[slab.number] = slab
                    table = transfer.source_hold.tables[pair.source_shard][0]
                    end, by = pair.source_end, self.transport
                    offer = Offer(end, slab.number, table, start, stop, after, by)
                    try:
                        self._source.do(offer)
                    except Exception:
                        self._forget(slab)
                        raise

    def _begin(self, post: Post) -> None:
        """Begin a run."""
        self.forget_all()
        self._post = post

    def forget_all(self) -> None:
        """Forget the slabs of an interrupted run, which no endpoint will receive."""
        with self._lock:
            left = list(self._slabs.values())
        for slab in left:
            self._forget(slab)

    def place(self, landed: Landed) -> None:
        """Write a slab to its pages.

        If writing fails, or if the slab is not what was sent, this is reported to the ``post`` of
        ``send``.

        Raises:
            Exception: the destination cannot launch the copy, or is lost.
        """
        slab = landed.slab
        table = slab.transfer.dest_hold.tables[slab.pair.dest_shard][0]
        try:
            self._dest.do(Place(slab.pair.dest_end, slab.number, table, slab.start, slab.stop))
        except Exception:
            self._forget(slab)
            raise
        if not self._verify:
            self._take(slab)

    def drop(self, landed: Landed) -> None:
        """Forget a slab that will not be written."""
        self._forget(landed.slab)

    def _hear(self, answer: SlabAnswer) -> None:
        if answer.slab in self._probing:
            self._hear_probe(answer)
            return
        with self._lock:
            slab = self._slabs.get(answer.slab)
            if slab and isinstance(answer, Pulled):
                slab.is_pulled = True
        match answer:
            case Offered() if slab:
                slab.checksum_LT = answer.checksum_LT
                pull = Pull(slab.pair.dest_end, slab.number, self.transport, answer.address)
                try:
                    self._dest.do(pull)
                except ProcessLost as error:  # Only this slab: others may be for a new process.
                    self._forget(slab)
                    self._post(Failed(self._ends[1], error, slab.transfer))
            case Pulled() if slab:
                self._post(Landed(slab, answer.began, answer.ended))
            case Pulled():
                with suppress(ProcessLost):  # It was given up while it was on its way.
                    self._dest.do(Drop(answer.end, answer.slab, self.transport))
            case Checked() if slab:
                self._check(slab, answer)
            case SlabFailed() if slab or not answer.by_source:
                if slab:
                    self._forget(slab)
                blamed, why = self._blame(answer)
                found_by = slab.transfer if slab and answer.by_source else None
                self._post(Failed(blamed, why, found_by))

    def _blame(self, failed: SlabFailed) -> tuple[str, ProcessLost | SlabLost]:
        """Return the instance to blame and the reason, which may be that its process has ended."""
        number = 0 if failed.by_source else 1
        lost = self.sides[number].why_lost(EXPLAINED_S)
        return self._ends[number], ProcessLost(lost) if lost else SlabLost(failed.line)

    def _hear_probe(self, answer: SlabAnswer) -> None:
        match answer:
            case Offered(_, number, address):
                end = self._probing[number].dest_end
                try:
                    self._dest.do(Pull(end, number, self.transport, address, known=True))
                except ProcessLost as error:
                    self._probed.put(SlabFailed(end, number, False, str(error)))
            case Pulled() | SlabFailed():
                self._probed.put(answer)

    def _check(self, slab: Slab, answer: Checked) -> None:
        self._take(slab)
        assert slab.checksum_LT is not None
        pair, tokens = slab.pair, (slab.start, slab.stop)
        try:
            compare(
                slab.transfer,
                tokens,
                pair.form.first,
                pair.dest_shard,
                pair.page_size,
                slab.checksum_LT,
                answer.checksum_LT,
            )
        except JaxinferError as error:
            self._post(Failed(self._ends[1], error))

    def _lose(self, instance: str, why: str) -> None:
        """Cancel slabs on their way after one of the two instances is lost.

        Slabs already pulled no longer need the source.
        """
        with self._lock:
            lost = [s for s in self._slabs.values() if instance == self._ends[1] or not s.is_pulled]
            # Removed now, because later answers about them come too late.
            for slab in lost:
                del self._slabs[slab.number]
        for slab in lost:
            self._drop(slab)
        self._post(Failed(instance, ProcessLost(why)))
        by_source = instance == self._ends[0]
        for number, pair in list(self._probing.items()):
            self._probed.put(SlabFailed(pair.source_end, number, by_source, why))

    def _take(self, slab: Slab) -> bool:
        """Mark a slab as finished; return whether it was unfinished."""
        with self._lock:
            return self._slabs.pop(slab.number, None) is not None

    def _forget(self, slab: Slab) -> None:
        if self._take(slab):
            self._drop(slab)

    def _drop(self, slab: Slab) -> None:
        for side, end in ((self._source, slab.pair.source_end), (self._dest, slab.pair.dest_end)):
            with suppress(ProcessLost):  # Nothing is left there.
                side.do(Drop(end, slab.number, self.transport))


def starts_of(transfer: Transfer) -> range:
    """Return the positions at which the slabs of a transfer begin."""
    return range(transfer.start, transfer.stop, SLAB_TOKENS)
