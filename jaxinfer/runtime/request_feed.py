"""Feeds requests into a run: reads them as there is room, and compiles steps that they need."""

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
    """The requests of one run that have not ended.

    Args:
        requests: see ``Continuations``.

    Attributes:
        groups: groups that have been read and have not ended.
        answers: makes the texts of their outputs.
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
        """Read more requests if there is room, and return those that wait for no others.

        If the requests need a new sampler, it is compiled first; all later steps use it.

        Args:
            progress: receives the progress of compiling.
            at_least_one: read a request even without room, if any are left.

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
            if request.follows:
                self._releases.hold_for(request.follows.id, request)
            elif request.after_ends:
                self._releases.hold(request.after_ends, request)
            else:
                ready.append(request)
        return ready

    def due(self, now: float) -> list[RequestState]:
        """Return the requests whose wait for others to end is over.

        Args:
            now: seconds on the world's clock.
        """
        return self._come(self._releases.due(), now)

    def one_ended(self, request: RequestState, now: float) -> list[RequestState]:
        """Record that all continuations of a prompt have ended; return requests that waited for it.

        Args:
            request: the continuation that ended last.
        """
        found = self._releases.ended(request.id)
        for follower in found:
            if follower.follows:
                follower.take_history(request)
        return self._come(found, now)

    def _come(self, requests: list[RequestState], now: float) -> list[RequestState]:
        for request in requests:
            others = self.groups.held_back.get(sampling_of(request).parent, ())
            for each in (request, *others):
                each.arrival = each.metrics.arrival = now + each.arrival
        return requests

    def check_all_came(self) -> None:
        """Raise JaxinferError if a request waits for the end of more requests than the run has."""
        if self._releases:
            raise JaxinferError(
                "a request waits for the ends of more requests than there are: its after_ends must "
                "be below their number"
            )

    def _widen(self, wanted: SamplerShape, progress: Progress) -> None:
        if self._sampler is not None:
            wanted = self._sampler.widened(wanted)
        if wanted != self._sampler:
            # Before a run, nothing waits for this; during a run, steps wait for what they need.
            wait, self._sampler = self._sampler is None, wanted
            for engine in self._cluster.engines.values():
                # Closed, because an interrupted thread may be kept with everything that it refers
                # to.
                with (
                    suppress(ProcessGone),  # The first step for it will show it.
                    closing(engine.worker.prepare(wanted, wait)) as left,
                ):
                    if total := next(left):
                        progress("compiling samplers", total)
                        for count in left:
                            progress("compiling samplers", count)
