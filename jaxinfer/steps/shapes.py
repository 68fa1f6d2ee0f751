"""The buckets that steps are padded to."""

from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple

from jaxinfer.serving.batch import Batch


class StepShape(NamedTuple):
    """The shape that a step is compiled for.

    Attributes:
        rows: largest number of decodes and of sampled tokens.
        tokens: tokens of decodes and prefill chunks together.
        chunks: largest number of prefill chunks; if 0, each token is a decode.
    """

    rows: int
    tokens: int
    chunks: int


@dataclass(frozen=True)
class StepLimits:
    """The largest batch of an instance, and the buckets that follow from it.

    Attributes:
        max_pages: pages of the longest sequence.
        given_buckets: see ``EngineOptions.token_buckets``.
        multiple: each bucket's tokens are a multiple of this number, as some layouts shard them.
        parts: number of micro-batches of a step; a part of the largest decodes has its own bucket.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_pages: int
    page_size: int
    given_buckets: tuple[int, ...] | None = None
    multiple: int = 1
    parts: int = 1

    @property
    def row_buckets(self) -> list[int]:
        """Numbers of decode rows: each is a quarter of the next."""
        most = min(self.max_num_seqs, self.max_num_batched_tokens)
        ladder = _ladder(most, 4, smallest=4)
        return ladder if self.parts == 1 else sorted({*ladder, -(-most // self.parts)})

    @property
    def token_buckets(self) -> list[int]:
        """Numbers of tokens with prefill: each is a quarter of the next, or as given."""
        if self.given_buckets:
            return list(self.given_buckets)
        ladder = _ladder(self.max_num_batched_tokens, 4, smallest=64)
        return sorted({self._whole(tokens) for tokens in ladder})

    @property
    def max_chunks(self) -> int:
        """Largest number of prefill chunks in one step; each has at least two tokens."""
        return min(self.max_num_seqs, self.max_num_batched_tokens // 2)

    def shapes(self) -> list[StepShape]:
        """Return the buckets, the largest first."""
        most = self.row_buckets[-1]
        shapes = [StepShape(rows, self._whole(rows), 0) for rows in self.row_buckets]
        # The largest possible number of rows: a few empty ones cost little in a prefill, but each
        # shape takes seconds to compile, and a hundred megabytes.
        shapes += [
            StepShape(most, tokens, self.max_chunks)
            for tokens in self.token_buckets
            if tokens >= max(most, 2)
        ]
        return sorted(shapes, key=lambda s: (s.tokens, s.rows, s.chunks), reverse=True)

    def shape_for(self, batch: Batch) -> StepShape:
        """Return the smallest bucket that holds the batch."""
        work = batch.work
        return self.smallest(work.singles, work.tokens, work.sampled)

    def smallest(self, singles: int, tokens: int, samples: int) -> StepShape:
        """Return the smallest bucket for ``tokens``, including ``singles`` rows of one token."""
        if tokens == singles:
            rows = _round_up(max(singles, samples, 1), self.row_buckets)
            return StepShape(rows, self._whole(rows), 0)
        most = self.row_buckets[-1]
        return StepShape(most, _round_up(max(tokens, most), self.token_buckets), self.max_chunks)

    def _whole(self, tokens: int) -> int:
        """Return a bucket of at least this many tokens that the layout can shard."""
        return -(-tokens // self.multiple) * self.multiple


def _round_up(count: int, buckets: list[int]) -> int:
    return buckets[bisect_left(buckets, count)]


def _ladder(largest: int, factor: int, smallest: int) -> list[int]:
    steps = [largest]
    while steps[-1] // factor >= smallest:
        steps.append(steps[-1] // factor)
    return steps[::-1]
