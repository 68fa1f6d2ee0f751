"""Disaggregated prefill (Cronus, section 3.1): all of a prompt here, all decoding there."""

from collections.abc import Collection, Sequence
from itertools import islice

from pydantic import Field

from jaxinfer.errors import JaxinferError
from jaxinfer.serving.system import (
    Assignment,
    ClusterView,
    HandOffRule,
    Leg,
    RequestView,
    System,
    only_one_left,
)
from jaxinfer.validation import OptionError, Options, did_you_mean


class DisaggregatedOptions(Options):
    """Options of ``Disaggregated``.

    High-low and low-high are the same system with the instances on the other group.

    Attributes:
        prefill, decode: names of the two instances.
        hand_off: when the KV goes on.
        max_in_prefill: requests that wait or run in the prefill instance, at most.
    """

    prefill: str = "prefill"
    decode: str = "decode"
    hand_off: HandOffRule = "on_demand"
    max_in_prefill: int = Field(default=2, ge=1)


class Disaggregated(System):
    """As Cronus with the cut at the prompt's end, which is how the paper runs it."""

    Options = DisaggregatedOptions
    options: DisaggregatedOptions
    ttft_counts_transfer = True

    def check(self, instances: Collection[str]) -> None:
        """Two instances, by the names in the options."""
        for role in ("prefill", "decode"):
            name = getattr(self.options, role)
            if name not in instances:
                raise OptionError(f"{role} is {name!r}: {did_you_mean(name, instances)}")
        if self.options.prefill == self.options.decode:
            raise JaxinferError(f"prefill and decode are both {self.options.prefill!r}")

    def routes(self, instances: Collection[str]) -> Collection[tuple[str, str]]:
        """From prefill to decode."""
        return [(self.options.prefill, self.options.decode)]

    def route(self, waiting: Collection[RequestView], cluster: ClusterView) -> Sequence[Assignment]:
        """A leg to the prompt's end, then one to the finish; or all on what is left."""
        options = self.options
        if left := only_one_left(cluster, options.prefill, options.decode):
            return [Assignment(request.id, (Leg(left),)) for request in waiting]
        free = options.max_in_prefill - cluster.instances[options.prefill].num_requests
        return [
            Assignment(
                request.id,
                (Leg(options.prefill, request.prompt_len, options.hand_off), Leg(options.decode)),
            )
            for request in islice(waiting, max(free, 0))
        ]
