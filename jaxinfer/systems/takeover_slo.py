"""Takeover's targets for latencies, and what a run says of the one for TBT."""

from collections.abc import Mapping

from pydantic import Field

from jaxinfer.options.validation import Options
from jaxinfer.serving.system import StepView
from jaxinfer.systems.takeover_books import Book


class Slo(Options):
    """Targets that steps' prompt tokens go by, and prompts under way while few requests wait.

    Attributes:
        ttft: Seconds from a request's arrival to its first token.
        tbt: Seconds from one token of a request to its next.
    """

    ttft: float | None = Field(default=None, gt=0)
    tbt: float | None = Field(default=None, gt=0)


def attention_s(book: Book, step: StepView) -> float:
    """Seconds for which the next chunk attends to what a step has computed of its prompt."""
    done = ((row.start + row.count, row.request.prompt_len) for row in step.rows)
    return book.kind.speeds.prefix_s * max((at for at, length in done if at < length), default=0)


class StepsBesideTarget:
    """Steps with decodes, those of them that take longer than the target for TBT, and why."""

    def __init__(self) -> None:
        self._steps = self._longer = self._by_decodes = self._for_ttft = 0

    def note(self, book: Book, step: StepView, tbt: float) -> None:
        """Count a step that has ended, by the book as it was before."""
        if not book.decodes:
            return
        self._steps += 1
        if step.end - step.start > tbt:
            self._longer += 1
            self._by_decodes += book.step_s > tbt
            self._for_ttft += book.for_ttft

    def report(self) -> Mapping[str, object]:
        """Say how many steps were longer, and what would keep the target."""
        needs = []
        if self._by_decodes:
            needs.append(f"{self._by_decodes} hold too many decodes: a smaller max_num_seqs there")
        if self._for_ttft:
            needs.append(
                f"{self._for_ttft} have more prompt tokens as slo.ttft was at risk: a longer "
                "slo.ttft, or a lower rate"
            )
        if rest := self._longer - self._by_decodes - self._for_ttft:
            needs.append(
                f"{rest} were launched before the limit, or estimated as shorter: a smaller "
                "max_num_batched_tokens, or a smaller slo.tbt"
            )
        counts = {"with_decodes": self._steps, "longer": self._longer}
        return counts | ({"would_keep_it": "; ".join(needs)} if needs else {})
