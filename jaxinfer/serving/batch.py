"""Batches to launch: rows of a step and its work in numbers, and transfers."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxinfer.serving.kv_shards import HeldPages
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.system import MoveSlices


@dataclass(slots=True)
class Row:
    """A request's part of a batch: KV entries ``start`` to ``start + count``.

    Attributes:
        samples: the row's last position yields a token.
        input_pending: the row's input token is still on the device (``count`` is 1 then).
        epoch: the request's epoch at launch; a row of an older one is void.
        hold: the pages it reads and writes, in use until the step ends.
    """

    request: RequestState
    start: int
    count: int
    samples: bool
    input_pending: bool
    epoch: int
    hold: HeldPages


@dataclass(slots=True)
class ShardWork:
    """Counts of a step's attention in one shard, where a stage's KV heads lie in several.

    Attributes:
        pairs: slices of KV heads of rows of one token; ``entries``: that they see together.
        chunks: of the other rows, KV entries before the chunk, its tokens, and slices that lie
            here.
    """

    pairs: int = 0
    entries: int = 0
    chunks: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def heads(self) -> int:
        """Slices that lie here, over all rows."""
        return self.pairs + sum(slices for _, _, slices in self.chunks)

    @property
    def tokens(self) -> int:
        """Tokens over all slices, of those whose queries come here."""
        return self.pairs + sum(count * slices for _, count, slices in self.chunks)


@dataclass(slots=True)
class Work:
    """Counts over a step's rows.

    Attributes:
        tokens: number of tokens in all; ``singles``: number of rows with one token.
        sequences: rows.
        sampled: rows that yield a token.
        single_context: KV entries that the rows of one token see, their own included.
        chunks: for each other row, KV entries before the chunk and its tokens.
        decodes: rows that feed back a sampled token; a prompt's last token may be a single, too.
        shards: for each shard of the instance, what its attention has to do; empty where each stage
            has one.
        halves: work of each half, if the step is computed as two halves of its rows in turn.
        single_span: least and most KV entries that a row of one token sees; None if not asked for,
            or if no row has one token.
    """

    tokens: int
    singles: int
    sequences: int
    sampled: int
    single_context: int
    chunks: list[tuple[int, int]]
    decodes: int = 0
    shards: Sequence[ShardWork] = ()
    halves: Sequence["Work"] = ()
    single_span: tuple[int, int] | None = None

    @property
    def pairs(self) -> float:
        """Pairs of a chunk's token and an entry that it sees."""
        return sum(count * (start + (count + 1) / 2) for start, count in self.chunks)


def work_of(
    rows: Sequence[Row],
    grouped: int = 0,
    grouped_context: int = 0,
    spans: Sequence[tuple[int, int]] | None = None,
) -> Work:
    """Count a step's work once, for its costs, reports and look-ups.

    Args:
        grouped: decodes besides, which see ``grouped_context`` KV entries.
        spans: least and most KV entries that one of these sees, if there are any; None if not asked
            for.
    """
    singles = sampled = decodes = sequences = grouped
    context, tokens = grouped_context, 0
    chunks: list[tuple[int, int]] = []
    for row in rows:
        sequences += 1
        sampled += row.samples
        start = row.start
        if row.count == 1:
            singles += 1
            context += start + 1
            decodes += start >= row.request.prompt_len
        else:
            tokens += row.count
            chunks.append((start, row.count))
    work = Work(tokens + singles, singles, sequences, sampled, context, chunks, decodes)
    if spans is not None and singles:
        seen = [*spans, *((row.start + 1, row.start + 1) for row in rows if row.count == 1)]
        work.single_span = min(least for least, _ in seen), max(most for _, most in seen)
    return work


def shard_work(rows: Sequence[Row]) -> list[ShardWork]:
    """Return the attention work of each shard of an instance for a step's rows."""
    found = [ShardWork() for _ in rows[0].hold.tables]
    for row in rows:
        for work, table in zip(found, row.hold.tables, strict=True):
            if not table:
                continue
            if row.count == 1:
                work.pairs += len(table)
                work.entries += len(table) * (row.start + 1)
            else:
                work.chunks.append((row.start, row.count, len(table)))
    return found


@dataclass(slots=True, eq=False)
class Transfer:
    """KV entries ``start`` to ``stop`` of one request on their way between two holds.

    Attributes:
        epoch: the request's epoch at the start; a transfer of an older one is void.
        source, dest: instances of ``source_hold`` and of ``dest_hold``.
        requested: when the data was there to be sent, or the step was launched that computes it,
            in seconds.
        slice_move: set where only some slices of KV heads move, between shards of one
            instance; otherwise all layers and heads move.
    """

    request: RequestState
    epoch: int
    source: str
    dest: str
    source_hold: HeldPages
    dest_hold: HeldPages
    start: int
    stop: int
    requested: float
    slice_move: MoveSlices | None = None


@dataclass(slots=True)
class Batch:
    """The rows of one step, decodes first.

    ``num_waiting``, ``num_running`` and ``pages_in_use`` describe the instance at launch.
    ``grouped`` decodes besides, which see ``grouped_context`` KV entries, have no rows: in a world
    that looks at none. They stand ``among`` the rows of one index to another, all of which are in
    the order of admission.
    ``transfers`` are of what the step computes: each piece of the model leaves as it is done.
    ``halves`` has the rows of two halves that stages compute in turn where they have KV heads on
    several devices; empty where they compute all rows at once.
    ``spans`` has the least and most that one of the grouped sees, where the world asks.
    ``work`` counts what the rows hold.
    """

    instance: str
    rows: list[Row]
    num_waiting: int
    num_running: int
    pages_in_use: int
    grouped: int = 0
    grouped_context: int = 0
    transfers: list[Transfer] = field(default_factory=list)
    halves: Sequence[list[Row]] = ()
    spans: Sequence[tuple[int, int]] | None = None
    among: tuple[int, int] = (0, 0)
    work: Work = field(init=False)

    def __post_init__(self) -> None:
        """Count once."""
        self.work = work_of(self.rows, self.grouped, self.grouped_context, self.spans)
