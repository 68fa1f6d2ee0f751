"""Cronus: partially disaggregated prefill (section 4 of the paper).

The partial prefill instance (PPI, on the weak group) computes the first part of each prompt; the
chunked prefill instance (CPI, on the strong group) fetches that KV, computes the rest in chunks
beside its decodes, and decodes.
"""

from collections.abc import Collection, Sequence

from pydantic import Field

from jaxinfer.errors import JaxinferError
from jaxinfer.serving.system import Assignment, ClusterView, Leg, RequestView, System
from jaxinfer.validation import Options, did_you_mean


class CronusOptions(Options):
    """Options of ``Cronus``.

    Attributes:
        partial, chunked: names of the two instances.
        cut: a fixed share of each prompt for the PPI, in place of the Balancer's.
    """

    partial: str = "ppi"
    chunked: str = "cpi"
    cut: float | None = Field(default=None, ge=0, le=1)


class Cronus(System):
    """Splits each prompt so that both parts take equally long."""

    Options = CronusOptions
    options: CronusOptions

    def check(self, instances: Collection[str]) -> None:
        """Two instances, by the names in the options."""
        for role in ("partial", "chunked"):
            name = getattr(self.options, role)
            if name not in instances:
                raise JaxinferError(f"{role} is {name!r}: {did_you_mean(name, instances)}")
        if self.options.partial == self.options.chunked:
            raise JaxinferError(f"partial and chunked are both {self.options.partial!r}")

    def route(self, waiting: Collection[RequestView], cluster: ClusterView) -> Sequence[Assignment]:
        """At most two requests are in the PPI at a time, so that statistics are fresh."""
        free = 2 - cluster.instances[self.options.partial].num_requests
        assignments = []
        for request in list(waiting)[: max(free, 0)]:
            length = round((self.options.cut or 0) * request.prompt_len)
            legs = (Leg(self.options.partial, length), Leg(self.options.chunked))
            assignments.append(Assignment(request.id, legs))
        return assignments
