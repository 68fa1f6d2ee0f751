"""Predicts the lengths of answers from past answers (Aladdin, sections 2.3 and 4.3)."""

from bisect import bisect_right, insort
from collections import defaultdict


class History:
    """The lengths of past answers, in bins by the length of their prompts.

    Each bin ends at twice the length at which the previous bin ends.
    """

    def __init__(self) -> None:
        self._bins: defaultdict[int, list[int]] = defaultdict(list)
        self._sums: defaultdict[int, int] = defaultdict(int)
        self._count = self._sum = 0

    def add(self, prompt_len: int, output: int) -> None:
        """Add an answer of ``output`` tokens."""
        number = prompt_len.bit_length()
        insort(self._bins[number], output)
        self._sums[number] += output
        self._count += 1
        self._sum += output

    def mean(self, prompt_len: int) -> int | None:
        """Return the mean length of answers in the prompt's bin, or else of all, or None."""
        number = prompt_len.bit_length()
        if found := self._bins.get(number):
            return max(round(self._sums[number] / len(found)), 1)
        return max(round(self._sum / self._count), 1) if self._count else None

    def mean_above(self, prompt_len: int, output: int) -> int | None:
        """Return the mean length of the bin's answers longer than ``output``; None without any."""
        found = self._bins.get(prompt_len.bit_length(), [])
        longer = found[bisect_right(found, output) :]
        return round(sum(longer) / len(longer)) if longer else None
