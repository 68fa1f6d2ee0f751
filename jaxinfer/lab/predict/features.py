"""Features of a prompt, and the classes to predict, which are buckets of the answer's length.

Shape suffixes: N prompts, F features, K classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Odd numbers, whose products modulo a power of two differ for different tokens.
_HASH, _HASH_NEXT = 2654435761, 40503


@dataclass(frozen=True)
class LengthBuckets:
    """Buckets of lengths: class k begins at ``k * granularity``, and ends before the next class.

    Attributes:
        granularity: number of tokens of a bucket.
        cap: length at which answers were cut off; longer answers are in the last class.
    """

    granularity: int
    cap: int

    @property
    def count(self) -> int:
        """Number of classes, including that of answers that were cut off."""
        return -(-self.cap // self.granularity) + 1

    def of(self, length: int) -> int:
        """Return the class of an answer of ``length`` tokens."""
        return self.count - 1 if length >= self.cap else length // self.granularity

    def bounds(self, bucket: int) -> tuple[int, int]:
        """Return the smallest and largest number of output tokens.

        Nothing is known beyond the cap.
        """
        low, high = bucket * self.granularity, (bucket + 1) * self.granularity
        return (self.cap, self.cap) if bucket == self.count - 1 else (low, min(high, self.cap))


def bag_of_tokens(token_ids: Sequence[int], rows: int) -> np.ndarray:
    """Hash a prompt's tokens and neighbouring pairs to a bag of norm 1, and add its log length.

    Args:
        rows: number of features of the bag; one more is the logarithm of the prompt's length.
    """
    tokens = np.asarray(token_ids, np.int64)
    pairs = tokens[:-1] * _HASH_NEXT + tokens[1:] * _HASH + 1
    bag_F = np.zeros(rows + 1, np.float32)
    bag_F[np.concatenate([tokens * _HASH, pairs]) % rows] = 1
    bag_F /= np.sqrt(bag_F.sum())
    bag_F[rows] = np.log1p(len(tokens)) / 10
    return bag_F
