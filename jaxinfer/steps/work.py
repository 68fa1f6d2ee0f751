"""What a step computes, in numbers."""

from dataclasses import dataclass

from jaxinfer.serving.world import Batch


@dataclass(slots=True)
class Work:
    """What a step computes.

    Attributes:
        tokens: in all; ``decodes``: of rows with one token.
        sequences: rows.
        sampled: rows that yield a token.
        decode_context: KV entries that the rows of one token see, their own included.
        chunks: of the other rows, KV entries before the chunk and its tokens.
    """

    tokens: int
    decodes: int
    sequences: int
    sampled: int
    decode_context: int
    chunks: list[tuple[int, int]]

    @property
    def pairs(self) -> float:
        """Pairs of a chunk's token and an entry that it sees."""
        return sum(count * (start + (count + 1) / 2) for start, count in self.chunks)


def work_of(batch: Batch) -> Work:
    """A batch in numbers."""
    decodes = context = tokens = sampled = 0
    chunks: list[tuple[int, int]] = []
    for row in batch.rows:
        sampled += row.samples
        if row.count == 1:
            decodes += 1
            context += row.start + 1
        else:
            tokens += row.count
            chunks.append((row.start, row.count))
    return Work(tokens + decodes, decodes, len(batch.rows), sampled, context, chunks)
