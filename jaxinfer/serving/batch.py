"""Batches to launch: the rows of a step, counts of its work, and transfers."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxinfer.serving.kv_shards import HeldPages
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.system import MoveSlices


@dataclass(slots=True)
class Row:
    """A request's part of a batch: KV entries ``start`` to ``start + count``.

    Attributes:
        samples: whether the row's last position yields a token.
        input_pending: whether the row's input token is still on the device (``count`` is 1 then).
        epoch: the request's epoch at launch; a row of an older epoch is void.
        hold: pages that the row reads and writes; they stay in use until the step ends.
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
    """A step's attention work in one shard, for stages whose KV heads are in several shards.

    Attributes:
        pairs: number of (row, slice of KV heads) pairs here, for rows of one token.
        entries: KV entries that these pairs see together.
        chunks: for each other row: KV entries before the chunk, tokens of the chunk, and number of
            slices here.
    """

    pairs: int = 0
    entries: int = 0
    chunks: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def heads(self) -> int:
        """Number of slices here, over all rows."""
        return self.pairs + sum(slices for _, _, slices in self.chunks)

    @property
    def tokens(self) -> int:
        """Number of tokens whose queries come here, summed over all slices."""
        return self.pairs + sum(count * slices for _, count, slices in self.chunks)


@dataclass(slots=True)
class Work:
    """The work of a step, counted over its rows.

    Attributes:
        tokens: number of tokens in total.
        singles: number of rows with one token.
        sequences: number of rows.
        sampled: number of rows that yield a token.
        single_context: KV entries that the rows of one token see, including their own.
        chunks: KV entries before the chunk and number of its tokens, for each other row.
        decodes: number of rows that feed back a sampled token (a prompt's last token may be a
            single row, too).
        shards: work of attention in each shard of the instance; empty if each stage has one shard.
        halves: work of each part, if the step is computed as two halves, or as micro-batches, in
            turn.
        single_span: smallest and largest number of KV entries that a row of one token sees; None if
            not requested, or if no row has one token.
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
        """Number of pairs of a chunk's token and a KV entry that it sees."""
        return sum(count * (start + (count + 1) / 2) for start, count in self.chunks)


def work_of(
    rows: Sequence[Row],
    grouped: int = 0,
    grouped_context: int = 0,
    spans: Sequence[tuple[int, int]] | None = None,
) -> Work:
    """Count the work of a step, for its costs, reports and look-ups.

    Args:
        grouped: number of additional decodes, which see ``grouped_context`` KV entries.
        spans: smallest and largest number of KV entries that one of these sees, if there are any;
            None if not requested.
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
        epoch: the request's epoch at the start; a transfer of an older epoch is void.
        source: name of the instance of ``source_hold``.
        dest: name of the instance of ``dest_hold``.
        requested: time in seconds at which the data was ready to be sent, or at which the step that
            computes it was launched.
        slice_move: set if only some slices of KV heads move between shards of one instance;
            otherwise all layers and heads move.
        is_copy: whether the request has ended, and its pages go to a prefix cache.
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
    is_copy: bool = False


@dataclass(slots=True)
class Batch:
    """The rows of one step, decodes first.

    In some simulations, decodes are grouped and have no separate rows. ``work`` counts the rows
    and the grouped decodes.

    Attributes:
        num_waiting: number of waiting requests of the instance at launch.
        num_running: number of its running requests at launch.
        pages_in_use: number of its pages in use at launch.
        grouped: number of grouped decodes.
        grouped_context: KV entries that the grouped decodes see.
        transfers: transfers of KV that this step computes; each piece of the model is sent as soon
            as it is done.
        halves: rows of the two halves, if stages with KV heads on several devices compute the step
            in two halves, or of the micro-batches of stages with an FFN group; empty if they
            compute all rows at once.
        spans: smallest and largest number of KV entries that a grouped decode sees, if requested.
        among: range of the rows (first, end) between which the grouped decodes were admitted; all
            rows are in the order of admission.
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
        """Count the work."""
        self.work = work_of(self.rows, self.grouped, self.grouped_context, self.spans)
