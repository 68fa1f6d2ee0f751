"""The requests that take part in an instance's steps, as single rows or in groups."""

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from itertools import chain, count
from operator import attrgetter, itemgetter

from jaxinfer.serving.batch import Batch, Row
from jaxinfer.serving.features.decode_group import DecodeGroup, Member
from jaxinfer.serving.page_pool import PagePool
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.views import Counts

_request: Callable[[Member], RequestState] = attrgetter("request")


class Running:
    """Running requests in the order of their admission.

    Decodes that are launched in one step continue as a group. If a decode may be launched before
    its input token is known, all form one group. Otherwise each step in flight (for example of a
    pipeline) has its own group.

    Args:
        page_size: page size of the groups; None if each request has its own row.
        ahead: whether a group may be launched again before its last step has ended.
        num_output, keep, pool: see ``DecodeGroup``.
    """

    def __init__(
        self,
        page_size: int | None = None,
        ahead: bool = True,
        num_output: Callable[[RequestState], int] = attrgetter("max_tokens"),
        keep: Callable[[RequestState], None] | None = None,
        pool: PagePool | None = None,
    ) -> None:
        self._page_size, self._ahead = page_size, ahead
        self._num_output, self._keep, self._pool = num_output, keep, pool
        self._groups: list[DecodeGroup] = []
        # The steps in flight that have a group, the oldest first.
        self._launched: deque[DecodeGroup] = deque()
        self._all: dict[str, RequestState] = {}
        # For each request id, the number of its admission.
        self._number: dict[str, int] = {}
        self._numbers = count()
        # The requests outside of groups, also in the order of admission.
        self._ungrouped: dict[str, RequestState] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, request: RequestState) -> bool:
        return request.id in self._all

    def by_id(self) -> Mapping[str, RequestState]:
        """Return the running requests with up-to-date counters."""
        for group in self._groups:
            group.settle()
        return self._all

    def counts(self, to_come: int = 0) -> Counts:
        """Return the counts without updating the groups.

        Args:
            to_come: number of prompt tokens that other requests still have to compute.
        """
        decodes = decode_entries = begun_prompts = 0
        by_themselves: Iterable[RequestState] = self._ungrouped.values()
        for group in self._groups:
            decode_entries += group.begun()
            decodes += group.num_begun
            if group.fresh:
                by_themselves = chain(by_themselves, map(_request, group.fresh.values()))
        for request in by_themselves:
            computed = request.computed
            if computed >= request.prompt_len:
                decodes += 1
                decode_entries += computed
            else:
                begun_prompts += computed
                to_come += request.prompt_tokens_left
        kv_entries = decode_entries + begun_prompts
        # Calling ``Counts(...)`` would take as long as all the rest.
        return tuple.__new__(Counts, (len(self._all), decodes, decode_entries, kv_entries, to_come))

    def longest_decodes(self, count: int, but: Container[str] = ()) -> list[tuple[str, int]]:
        """Return ids and KV entries of the longest decodes without updating the groups.

        The longest comes first; among equal ones, the first admitted.
        """
        found: list[tuple[int, int, str]] = []
        by_themselves = [*self._ungrouped.values()]
        for group in self._groups:
            found += group.longest(count, but)
            by_themselves += map(_request, group.fresh.values())
        for request in by_themselves:
            if request.computed >= request.prompt_len and request.id not in but:
                found.append((request.computed, self._number[request.id], request.id))
        found.sort(key=lambda each: (-each[0], each[1]))
        return [(name, entries) for entries, _, name in found[:count]]

    @property
    def newest(self) -> RequestState:
        """The request admitted last."""
        return next(reversed(self._all.values()))

    def others_than(self, ids: set[str]) -> list[RequestState]:
        """Return the requests whose ids are not among ``ids``."""
        return [request for request in self._all.values() if request.id not in ids]

    @property
    def any_moves(self) -> bool:
        """True if slices of KV heads of a request are being moved or wait to be moved."""
        return any(
            request.slice_move or (request.hold and request.hold.copies)
            for request in self._all.values()
        )

    def add(self, request: RequestState) -> None:
        """Add a request, with its own rows at first."""
        self._all[request.id] = self._ungrouped[request.id] = request
        self._number[request.id] = next(self._numbers)

    def remove(self, request: RequestState) -> None:
        """Remove a request."""
        self.leave_group(request)
        del self._all[request.id], self._number[request.id]
        self._ungrouped.pop(request.id, None)

    def ungrouped(self) -> list[RequestState]:
        """Return the requests that each need their own row."""
        return list(self._ungrouped.values())

    def in_prompts(self) -> Iterator[RequestState]:
        """Yield the requests whose prompts are not fully computed yet."""
        fresh = (map(_request, group.fresh.values()) for group in self._groups)
        for request in chain(self._ungrouped.values(), *fresh):
            if request.computed < request.prompt_len:
                yield request

    def ready_group(self) -> DecodeGroup | None:
        """Return the group that the next step may launch; None if there is none.

        Of several groups it is the largest; requests of the others become single rows, and may join
        it.
        """
        if self._page_size is None:
            return None
        ready = [group for group in self._groups if self._ahead or group not in self._launched]
        if not ready:
            self._groups.append(
                DecodeGroup(self._page_size, self._num_output, self._keep, self._pool)
            )
            return self._groups[-1]
        group = max(ready, key=len)
        for other in ready:
            if other is not group:
                self._groups.remove(other)
                self._take_out(other)
        return group

    def steady_group(self) -> DecodeGroup | None:
        """Return the group that all requests and all grouped steps in flight belong to, or None."""
        if self._ungrouped or len(self._groups) != 1:
            return None
        (group,) = self._groups
        steady = len(group.active) == len(self._all) and all(g is group for g in self._launched)
        return group if steady else None

    def join(self, group: DecodeGroup, request: RequestState) -> None:
        """Let a request advance with a group."""
        group.join(request, self._number[request.id])
        del self._ungrouped[request.id]

    def trim(self, group: DecodeGroup, most: int) -> None:
        """Keep in a group the ``most`` requests admitted first; the others become single rows."""
        if len(group.active) <= most:
            return
        for request in [each for each in self._all.values() if each.id in group.active][most:]:
            group.leave(request)
        self._find_ungrouped()

    def dissolve(self, group: DecodeGroup) -> None:
        """Give all requests of a group separate rows again."""
        self._groups.remove(group)
        self._take_out(group)

    def launch(self, group: DecodeGroup, num_full: int) -> tuple[int, int]:
        """Start a step of a group; see ``DecodeGroup.launch``."""
        self._launched.append(group)
        return group.launch(num_full)

    def leave_group(self, request: RequestState) -> None:
        """Give a request its own row again, with up-to-date counters."""
        for group in self._groups:
            if request in group:
                group.leave(request)
                there = [*self._ungrouped.values(), request]
                there.sort(key=self._admitted)
                self._ungrouped = {each.id: each for each in there}

    def commit_group(self, batch: Batch, end: float) -> list[Row]:
        """Commit the oldest step in flight that has a group.

        Returns:
            The step's rows, in the same order as without groups. They include rows of requests that
            end with the step, or that have left the group since its launch.
        """
        group = self._launched.popleft()
        for request in group.ending():
            self.leave_group(request)
        left = group.commit(end)
        if not left:
            return batch.rows
        start, stop = batch.among
        among = [(self._number.get(row.request.id, -1), row) for row in batch.rows[start:stop]]
        merged = [row for _, row in sorted([*among, *left], key=itemgetter(0))]
        return [*batch.rows[:start], *merged, *batch.rows[stop:]]

    def _admitted(self, request: RequestState) -> int:
        return self._number[request.id]

    def _take_out(self, group: DecodeGroup) -> None:
        for request in self._all.values():
            if request in group:
                group.leave(request)
        self._find_ungrouped()

    def _find_ungrouped(self) -> None:
        groups = self._groups
        self._ungrouped = {
            id: request
            for id, request in self._all.items()
            if not any(request in group for group in groups)
        }
