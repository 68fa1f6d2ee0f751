"""Takeover's latency targets, and a report on how a run met the target for TBT."""

from collections.abc import Mapping

from pydantic import Field

from jaxinfer.options.validation import Options
from jaxinfer.papers.takeover.accounts import Account
from jaxinfer.serving.views import StepView


class Slo(Options):
    """Targets that limit prompt tokens in steps, and takeovers of prompts while few requests wait.

    Attributes:
        ttft: Seconds from a request's arrival to its first token.
        tbt: Seconds from one token of a request to its next.
    """

    ttft: float | None = Field(default=None, gt=0)
    tbt: float | None = Field(default=None, gt=0)


def attention_s(book: Account, step: StepView) -> float:
    """Return the seconds for which the next chunk attends to the prompt's computed part."""
    done = ((row.start + row.count, row.request.prompt_len) for row in step.rows)
    return book.kind.speeds.prefix_s * max((at for at, length in done if at < length), default=0)


class StepsBesideTarget:
    """Counts steps with decodes, and why some exceed the target for TBT."""

    def __init__(self) -> None:
        self._steps = 0
        self._longer: dict[str, int] = {}

    def note(self, book: Account, step: StepView, tbt: float) -> None:
        """Count a step that has ended, given the account from before the step."""
        if not book.decodes:
            return
        self._steps += 1
        if step.end - step.start <= tbt:
            return
        if book.kind.speeds.step_s > tbt:
            why = "read the weights for longer: a longer slo.tbt, or a faster GPU"
        elif book.step_s > tbt:
            why = "have too many decodes: a smaller max_num_seqs there"
        elif book.for_ttft:
            why = (
                "have more prompt tokens as slo.ttft is at risk: a longer slo.ttft, or a lower rate"
            )
        else:
            why = "were launched before the limit, or estimated as shorter: a smaller slo.tbt"
        self._longer[why] = self._longer.get(why, 0) + 1

    def report(self) -> Mapping[str, object]:
        """Return how many steps were too long, and what would meet the target."""
        counts = {"with_decodes": self._steps, "longer": sum(self._longer.values())}
        if not self._longer:
            return counts
        needs = "; ".join(f"{count} {why}" for why, count in self._longer.items())
        return counts | {"would_keep_it": needs}
