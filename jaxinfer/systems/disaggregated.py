"""Disaggregated prefill: one instance computes the prompt, another one decodes.

With one instance of each role, this is Cronus' baseline (section 3.1); with several, a system such
as DistServe.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import product

from pydantic import Field

from jaxinfer.options.validation import Options
from jaxinfer.serving.system import Assignment, System
from jaxinfer.serving.views import ClusterView, HandOffRule, Leg, RequestView
from jaxinfer.systems.instances import (
    Names,
    alive,
    check_roles,
    least_loaded,
    whole_on_least_loaded,
)


class DisaggregatedOptions(Options):
    """Options of ``Disaggregated``.

    High-low and low-high are the same system with the instances on exchanged groups.

    Attributes:
        prefill, decode: Names of the instances; a request goes to the one with the fewest requests.
        hand_off: When KV is sent.
        max_in_prefill: Largest number of requests in one prefill instance.
        fetch: Whether a prefill instance fetches missing pages of a prompt, such as those of an
            earlier answer, from the decode instance whose prefix cache has the longest part of it.
    """

    prefill: Names = ("prefill",)
    decode: Names = ("decode",)
    hand_off: HandOffRule = "on_demand"
    max_in_prefill: int = Field(default=2, ge=1)
    fetch: bool = False


class Disaggregated(System):
    """Prefills on some instances and decodes on others, like Cronus with a cut at the prompt's end.

    This is how Cronus' paper runs its baseline. Of the prefill instances with room for one more
    request, a request gets the one with the fewest requests; it also gets the decode instance with
    the fewest.
    """

    Options = DisaggregatedOptions
    options: DisaggregatedOptions
    ttft_counts_transfer = True

    def __init__(self, options: DisaggregatedOptions | None = None) -> None:
        super().__init__(options)
        self.needs_caches = self.options.fetch

    def check(self, instances: Collection[str]) -> None:
        """Check that all named instances exist, and that none has two roles."""
        roles = {"prefill": self.options.prefill, "decode": self.options.decode}
        check_roles(roles, instances)

    def routes(self, instances: Collection[str]) -> Collection[tuple[str, str]]:
        """Return routes from all prefill to all decode instances and, with ``fetch``, back."""
        prefill, decode = self.options.prefill, self.options.decode
        back = product(decode, prefill) if self.options.fetch else ()
        return [*product(prefill, decode), *back]

    def route(self, waiting: Collection[RequestView], cluster: ClusterView) -> Sequence[Assignment]:
        """Assign a leg that ends with the prompt, and a second one that ends with the request.

        If all instances of one role are lost, each request runs whole on one of the others.
        """
        options = self.options
        prefill, decode = alive(options.prefill, cluster), alive(options.decode, cluster)
        if bool(prefill) != bool(decode):
            return whole_on_least_loaded(prefill or decode, waiting, cluster)
        given: Counter[str] = Counter()
        assignments = []
        for request in waiting:
            # If none is left, asking for a lost one tells the loop that all are lost.
            here = least_loaded(prefill or options.prefill, cluster, given)
            if cluster.instances[here].num_requests + given[here] >= options.max_in_prefill:
                break
            there = least_loaded(decode, cluster, given)
            given.update((here, there))
            first = Leg(here, request.prompt_len, options.hand_off)
            source = self._holder(request, decode, cluster) if options.fetch else None
            assignments.append(Assignment(request.id, (first, Leg(there)), source))
        return assignments

    def _holder(
        self, request: RequestView, decode: Collection[str], cluster: ClusterView
    ) -> str | None:
        """Return the decode instance whose cache has most of the prompt."""
        found = {name: cluster.instances[name].cached_tokens(request) for name in decode}
        return max(found, key=found.__getitem__, default=None)
