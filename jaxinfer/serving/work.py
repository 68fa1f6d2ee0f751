"""What a step computes, in numbers."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxinfer.serving.world import Row


@dataclass(slots=True)
class Work:
    """Counts over a step's rows.

    Attributes:
        tokens: in all; ``singles``: of rows with one token.
        sequences: rows.
        sampled: rows that yield a token.
        single_context: KV entries that the rows of one token see, their own included.
        chunks: of the other rows, KV entries before the chunk and its tokens.
        decodes: rows that feed back a sampled token; a prompt's last token may be a single, too.
    """

    tokens: int
    singles: int
    sequences: int
    sampled: int
    single_context: int
    chunks: list[tuple[int, int]]
    decodes: int = 0

    @property
    def pairs(self) -> float:
        """Pairs of a chunk's token and an entry that it sees."""
        return sum(count * (start + (count + 1) / 2) for start, count in self.chunks)


def work_of(rows: "Iterable[Row]", grouped: int = 0, grouped_context: int = 0) -> Work:
    """Count once; asked for by whoever costs, reports or looks up a step.

    Args:
        grouped: decodes besides, which see ``grouped_context`` KV entries.
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
    return Work(tokens + singles, singles, sequences, sampled, context, chunks, decodes)
