"""The work of an instance whose steps are always full."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import mean
from typing import Self

from jaxinfer.serving.batch import Work
from jaxinfer.workload.lengths import BenchRequest


@dataclass(frozen=True)
class LengthStats:
    """Means and extremes of requests, in tokens.

    Attributes:
        prompt: mean length of a prompt.
        prompt_seen: mean length of the prompt that a prompt token belongs to.
        decodes: mean output tokens of a decode instance, which are all but the first.
        context: mean number of KV entries that a sampled token sees.
        longest_prompt: length of the longest prompt.
        longest: largest sum of prompt and output of one request.
    """

    prompt: float
    prompt_seen: float
    decodes: float
    context: float
    longest_prompt: int
    longest: int

    @classmethod
    def of(cls, work: Sequence[BenchRequest]) -> Self:
        """Return the lengths of these requests."""
        pairs = [(item.prompt_len, item.max_tokens) for item in work]
        tokens = sum(prompt for prompt, _ in pairs)
        decodes = sum(output - 1 for _, output in pairs)
        seen = sum((output - 1) * (prompt + output / 2) for prompt, output in pairs)
        return cls(
            tokens / len(pairs),
            sum(prompt * prompt for prompt, _ in pairs) / tokens,
            decodes / len(pairs),
            seen / decodes if decodes else mean(p + o for p, o in pairs),
            max(prompt for prompt, _ in pairs),
            max(prompt + output for prompt, output in pairs),
        )

    def prefill_step(self, tokens: int) -> tuple[Work, float]:
        """Return a step full of prompts, and how many prompts end in such a step.

        A long prompt takes several chunks.
        """
        ends = tokens / self.prompt
        chunk = min(round(self.prompt_seen), tokens)
        before = round((self.prompt_seen - chunk) / 2)
        count, rest = divmod(tokens, chunk)
        chunks = [(before, chunk)] * count + ([(before, rest)] if rest > 1 else [])
        rows = max(round(ends), 1)
        return Work(sum(n for _, n in chunks), 0, rows, rows, 0, chunks), ends

    def decode_step(self, batch: int) -> Work:
        """Return a step of ``batch`` decodes."""
        return Work(batch, batch, batch, batch, round(batch * self.context), [], batch)

    @cached_property
    def shortest_pool(self) -> dict[str, int]:
        """Return, by role, the fewest KV entries with which an instance can serve all requests."""
        return {"prefill": self.longest_prompt, "decode": self.longest}
