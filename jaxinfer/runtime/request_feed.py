"""Requests that come into a run: read as there is room, and compiled for where that is needed."""

from collections.abc import Iterable
from contextlib import closing, suppress

from jaxinfer.errors import JaxinferError
from jaxinfer.runtime.cluster import Cluster
from jaxinfer.runtime.parallel_sampling import Continuations
from jaxinfer.runtime.processes.process import ProcessGone
from jaxinfer.runtime.processes.process_group import Progress
from jaxinfer.runtime.stage.sampler import SamplerShape
from jaxinfer.runtime.stage.sampling_inputs import sampler_shape, sampling_of
from jaxinfer.serving.releases import Releases
from jaxinfer.serving.request_state import RequestState
from jaxinfer.text.stop import Answers
from jaxinfer.text.tokenizer import Tokenizer


class RequestFeed:
    """The requests of one run on their way in.

    Args:
        requests: see ``Continuations``.

    Attributes:
        groups: groups that have been read and have not ended.
        answers: their texts.
    """

    def __init__(
        self, requests: Iterable[RequestState], cluster: Cluster, tokenizer: Tokenizer
    ) -> None:
        self.groups = Continuations(requests, cluster.cached_page_size, cluster.read_ahead)
        self.answers = Answers(tokenizer)
        self._cluster = cluster
        self._sampler: SamplerShape | None = None

        self._releases: Releases[RequestState] = Releases()

    def read(self, progress: Progress, at_least_one: bool = False) -> list[RequestState]:
        """More requests if there is room, those that wait for others left out.

        Steps launched from here on have a sampler for them; what is new of it is compiled first.

        Args:
            progress: told of compiling.
            at_least_one: whether there is room or not, if any are left.

        Raises:
            JaxinferError: see ``Continuations.read``.
        """
        found = self.groups.read(at_least_one)
        if found:
            self.answers.add(found)
            self._widen(sampler_shape(found), progress)
        ready = []
        for request in found:
            if request.goes_first:
                continue
            if request.after_ends:
                self._releases.hold(request.after_ends, request)
            else:
                ready.append(request)
        return ready

    def due(self, now: float) -> list[RequestState]:
        """Requests whose wait for others' ends is over.

        Args:
            now: seconds on the world's clock.
        """
        return self._come(self._releases.due(), now)

    def one_ended(self, now: float) -> list[RequestState]:
        """Count a prompt all of whose continuations have ended; those that have waited for it."""
        return self._come(self._releases.ended(), now)

    def _come(self, requests: list[RequestState], now: float) -> list[RequestState]:
        for request in requests:
            others = self.groups.held_back.get(sampling_of(request).parent, ())
            for each in (request, *others):
                each.arrival = each.metrics.arrival = now + each.arrival
        return requests

    def check_all_came(self) -> None:
        """Raise JaxinferError where a request has waited for more ends than there were."""
        if self._releases:
            raise JaxinferError(
                "a request waits for the ends of more requests than there are: its after_ends must "
                "be below their number"
            )

    def _widen(self, wanted: SamplerShape, progress: Progress) -> None:
        if self._sampler is not None:
            wanted = self._sampler.widened(wanted)
        if wanted != self._sampler:
            # Before a run there is nothing to hold up; within one, steps wait for what they need.
            wait, self._sampler = self._sampler is None, wanted
            for engine in self._cluster.engines.values():
                # Closed, since whoever is interrupted here may be kept with all that it has.
                with (
                    suppress(ProcessGone),  # The first step for it will show it.
                    closing(engine.worker.prepare(wanted, wait)) as left,
                ):
                    if total := next(left):
                        progress("compiling samplers", total)
                        for count in left:
                            progress("compiling samplers", count)
