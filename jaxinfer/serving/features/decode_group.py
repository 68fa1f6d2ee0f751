"""Decodes that advance together while their tokens are not read, to speed up simulations.

A step of hundreds of decodes costs as much simulation time as a step of one. Results are the same,
bit for bit, as with one row per request.
"""

from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Container
from dataclasses import dataclass
from operator import attrgetter, itemgetter

from jaxinfer.serving.batch import Row
from jaxinfer.serving.kv_shards import HeldPages
from jaxinfer.serving.page_pool import PagePool
from jaxinfer.serving.request_state import RequestState

# After this many recorded step times, members take theirs.
_TIMES_KEPT = 4096


@dataclass(slots=True, eq=False)
class Member:
    """A request in the group.

    Attributes:
        number: position of the request in the order of admission.
        first: number of its first step in the group.
        last: number of the step that ends it.
        last_launch: number of the last step that ``max_tokens`` lets it take part in. The request
            also takes part in steps after ``last`` that are launched before ``last`` has ended.
        start: KV entries launched before ``first``.
        launched: number of group steps whose launch its counters include.
        committed: number of group steps whose end its counters include.
    """

    request: RequestState
    number: int
    first: int
    last: int
    last_launch: int
    start: int
    launched: int
    committed: int


class DecodeGroup:
    """Running requests of one instance that only decode until they end.

    Each step of the group computes one token for each of them. Their counters are not updated at
    each step: ``settle`` updates them, and ``leave`` also takes a request out. The group counts its
    steps, and knows which requests end with which step, and which need a page in which. This works
    because the positions of its requests differ by constants.

    Args:
        num_output: number of output tokens that end a request, ``max_tokens`` or less.
        keep: called with each request that has filled a page, to add the page to a prefix cache;
            None if there is no cache.
        pool: pool of all members' pages, if it only counts them. Steps then take pages from it at
            once, and a member's hold has them when the member is settled.

    Attributes:
        active: members that the latest launched step advances, or that the next step will.
        fresh: members that had completed no step of the group at the last call of ``begun``; their
            requests' ``computed`` is up to date.
        num_begun: number of all other members.
    """

    def __init__(
        self,
        page_size: int,
        num_output: Callable[[RequestState], int],
        keep: Callable[[RequestState], None] | None = None,
        pool: PagePool | None = None,
    ) -> None:
        self._num_output, self._keep, self._pool = num_output, keep, pool
        self.active: dict[str, Member] = {}
        self._members: dict[str, Member] = {}
        self.fresh: dict[str, Member] = {}
        # For the other members, the sum of their KV entries minus the number of the group's ended
        # steps.
        self.num_begun = self._entries = 0
        # For these members and some that have left, the longest first: their KV entries minus the
        # number of the group's steps, then their admission. None until it is needed.
        self._longest: list[tuple[int, int, Member]] | None = None
        self._launched = 0
        self._committed = 0
        # End times of the steps from number _oldest on.
        self._times: list[float] = []
        self._oldest = 0
        self._ends: defaultdict[int, dict[str, Member]] = defaultdict(dict)
        self._last_launches: defaultdict[int, dict[str, Member]] = defaultdict(dict)
        # For each step number modulo the page size, the members that may need a page then.
        self._turns: list[dict[str, Member]] = [{} for _ in range(page_size)]
        # Members left out of further steps, with steps in flight; for the sake of ``keep``.
        self._retired: dict[str, Member] = {}
        self._context = 0
        # Smallest and largest active position, minus the number of the group's steps; None if
        # unknown.
        self._offsets: tuple[int, int] | None = None
        # For each step in flight, the rows of requests that have left since, each with the number
        # of the request's admission.
        self._left: dict[int, list[tuple[int, Row]]] = {}
        # The step from which on all whose turn it is need a page: some come with more room.
        self._even_from = 0

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, request: RequestState) -> bool:
        """Tell whether the request is advanced here."""
        return request.id in self._members

    def takes(self, request: RequestState) -> bool:
        """Tell whether a running request only has to decode from now on, one token per step."""
        sampled = len(request.output_token_ids) + request.pending
        return (
            request.launched + 1 == request.prompt_len + sampled
            and 0 < sampled < self._num_output(request)
            and request.legs[0].until is None
            and not request.paused
            and not request.slice_move
        )

    def join(self, request: RequestState, number: int) -> None:
        """Add a request from the next step on; it was the ``number``-th to be admitted."""
        first, start = self._launched, request.launched
        before = first - 1 - len(request.output_token_ids) - request.pending
        last, last_launch = before + self._num_output(request), before + request.max_tokens
        member = Member(request, number, first, last, last_launch, start, first, first)
        self._members[request.id] = self.active[request.id] = self.fresh[request.id] = member
        self._ends[last][request.id] = self._last_launches[last_launch][request.id] = member
        self._turn_of(member)[request.id] = member
        self._context += start + 1
        self._offsets = None
        assert request.hold
        room = request.hold.capacity - start
        self._even_from = max(self._even_from, first + room - len(self._turns) + 1)

    def retire(self) -> None:
        """Before a step, deactivate members whose last decode has been launched."""
        for member in self._last_launches.get(self._launched - 1, {}).values():
            if member.request.id in self.active:
                self._deactivate(member)
                self._retired[member.request.id] = member

    def num_full(self) -> int:
        """Return how many members need one more page per slice in the next step."""
        turn = self._turns[self._launched % len(self._turns)]
        if self._launched >= self._even_from:
            return len(turn)
        return sum(self._position(each) >= _hold(each).capacity for each in turn.values())

    def span(self) -> tuple[int, int]:
        """Return the smallest and largest number of KV entries that a row of the next step sees.

        They are computed again only after members have joined or left.
        """
        if self._offsets is None:
            offsets = [member.start - member.first for member in self.active.values()]
            self._offsets = min(offsets), max(offsets)
        least, most = self._offsets
        return least + self._launched + 1, most + self._launched + 1

    def launch(self, num_full: int) -> tuple[int, int]:
        """Start a step; the caller has checked that its ``num_full`` pages fit.

        Returns:
            The number of the step's rows, and the KV entries that they see, their own included.
        """
        if self._pool:
            self._pool.take(num_full)
        elif num_full:
            for member in self._turns[self._launched % len(self._turns)].values():
                grown = _hold(member).grow(self._position(member) + 1)
                assert grown, "the room was counted before"
        rows, context = len(self.active), self._context
        self._context += rows
        self._launched += 1
        return rows, context

    def go_on(
        self, end: float, free: float, until: float, seconds: Callable[[int], float]
    ) -> tuple[list[float], float, float, int, list[tuple[int, int]]]:
        """End the oldest step in flight and launch the next, repeatedly, until members change.

        Only for groups with a ``pool`` whose instance has a device of its own.

        Args:
            end: end of the oldest step in flight.
            free: time at which the device will have finished all launched steps.
            until: stop after a launched step that ends at this time or later. With several steps
                in flight, give ``end``: one step is then launched.
            seconds: returns the time of a step from the KV entries that its rows see.

        Returns:
            The ends of the steps that ended. Start, end and KV entries of the last launched step.
            For each launched step that took pages: how many steps had ended, and the pages in use.
        """
        ends: list[float] = []
        taken: list[tuple[int, int]] = []
        start, context, total = end, 0, self._context
        # Most of a simulation's time is here: what is looked up twice has a name.
        number, launched, rows = self._committed, self._launched, len(self.active)
        stops, last_launches, times, pool = self._ends, self._last_launches, self._times, self._pool
        turns, size, keep = self._turns, len(self._turns), self._keep
        assert pool
        if self._left or launched < self._even_from:
            return ends, start, end, context, taken
        while not ends or end < until:
            growing = len(turns[launched % size])
            if stops.get(number) or last_launches.get(launched - 1) or growing > pool.num_free:
                break
            ends.append(end)
            times.append(end)
            number += 1
            if len(times) == _TIMES_KEPT or (keep and (turns[number % size] or self._retired)):
                self._committed, self._launched = number, launched
                self._hand_out_times()
                for member in self._filling(number - 1) if keep else ():
                    assert keep
                    keep(member.request)
            if growing:
                pool.take(growing)
                taken.append((len(ends), pool.num_usable - pool.num_free))
            launched += 1
            context, total = total, total + rows
            start = free if free > end else end
            end = free = start + seconds(context)
        self._committed, self._launched, self._context = number, launched, total
        return ends, start, end, context, taken

    def ending(self) -> list[RequestState]:
        """Return the requests that end with the oldest step in flight and must leave the group."""
        return [member.request for member in self._ends.get(self._committed, {}).values()]

    def commit(self, end: float) -> list[tuple[int, Row]]:
        """Commit a step that has ended.

        Returns:
            The step's rows of requests that have left since its launch, each with its number in the
            order of admission, in this order. A request that has filled a page to be cached adds an
            empty row.
        """
        number = self._committed
        self._ends.pop(number, None)
        self._note_end(end)
        rows = self._left.pop(number, [])
        for member in self._filling(number) if self._keep else ():
            request = member.request
            assert request.hold
            request.hold.pin()
            row = Row(request, request.computed, 0, False, False, request.epoch, request.hold)
            rows.append((member.number, row))
        return sorted(rows, key=itemgetter(0))

    def _filling(self, number: int) -> list[Member]:
        """Members that have filled a page with a step that has ended, by their admission."""
        size = len(self._turns)
        found = [m for m in self._turns[(number + 1) % size].values() if m.first <= number]
        for member in self._retired.values():
            if not (member.start + number + 1 - member.first) % size and member.first <= number:
                found.append(member)
        found.sort(key=attrgetter("number"))
        for member in found:
            self._settle(member)
        return found

    def _note_end(self, end: float) -> None:
        self._committed += 1
        self._times.append(end)
        self._hand_out_times()

    def _hand_out_times(self) -> None:
        if len(self._times) == _TIMES_KEPT:
            self.settle()
            self._times.clear()
            self._oldest = self._committed

    def leave(self, request: RequestState) -> None:
        """Update a member and take it out; in steps in flight, it gets its own row."""
        member = self._members.pop(request.id)
        self._retired.pop(request.id, None)
        if not self.fresh.pop(request.id, None):
            self.num_begun -= 1
            self._entries -= member.start - member.first
        self._settle(member)
        if request.id in self.active:
            self._deactivate(member)
        del self._ends[member.last][request.id]
        with_it = self._last_launches[member.last_launch]
        del with_it[request.id]
        if not with_it:
            del self._last_launches[member.last_launch]
        assert request.hold
        for number in range(max(self._committed, member.first), member.launched):
            request.hold.pin()
            start = member.start + number - member.first
            row = Row(request, start, 1, True, True, request.epoch, request.hold)
            self._left.setdefault(number, []).append((member.number, row))

    def begun(self) -> int:
        """Return the KV entries of all members except the fresh ones.

        This takes time proportional to the number of fresh requests, and updates no counters.
        """
        while self.fresh and (member := next(iter(self.fresh.values()))).first < self._committed:
            del self.fresh[member.request.id]
            self.num_begun += 1
            self._entries += member.start - member.first
            if self._longest is not None:
                self._insert(self._longest, member)
        return self._entries + self.num_begun * self._committed

    def longest(self, most: int, but: Container[str] = ()) -> list[tuple[int, int, str]]:
        """Return KV entries, admission numbers and ids of the ``most`` members with the most
        entries.

        The longest comes first; among equal ones, the first admitted. Only members that ``begun``
        counts are considered.

        Args:
            but: ids to leave out from now on.
        """
        self.begun()
        there = self._longest
        if there is None or len(there) > 2 * len(self._members) + 64:  # Most of these have left.
            there = self._longest = []
            for member in self._members.values():
                if member.request.id not in self.fresh:
                    self._insert(there, member)
        found: list[tuple[int, int, Member]] = []
        looked = 0
        while looked < len(there) and len(found) < most:
            entry = there[looked]
            looked += 1
            name = entry[2].request.id
            if self._members.get(name) is entry[2] and name not in but:
                found.append(entry)
        there[:looked] = found
        return [
            (self._committed - offset, number, member.request.id)
            for offset, number, member in found
        ]

    def _insert(self, there: list[tuple[int, int, Member]], member: Member) -> None:
        insort(there, (member.first - member.start, member.number, member), key=itemgetter(0, 1))

    def settle(self) -> None:
        """Update the counters, tokens and times of all members."""
        for member in self._members.values():
            self._settle(member)

    def _settle(self, member: Member) -> None:
        request, stop = member.request, member.last_launch + 1
        if self._pool:
            self._settle_pages(member)
        launched, committed = min(self._launched, stop), min(self._committed, stop)
        ahead = launched - member.launched
        request.launched += ahead
        request.pending += ahead
        member.launched = launched
        if (count := committed - member.committed) > 0:
            request.pending -= count
            request.computed = member.start + committed - member.first
            request.output_token_ids.extend([0] * count)
            at = member.committed - self._oldest
            request.metrics.token_times.extend(self._times[at : at + count])
            member.committed = committed

    def _settle_pages(self, member: Member) -> None:
        """Give a hold the pages that steps have taken for it from ``pool``."""
        launched = min(self._launched, member.last_launch + 1)
        _hold(member).has_taken(member.start + launched - member.first)

    def _deactivate(self, member: Member) -> None:
        del self.active[member.request.id]
        del self._turn_of(member)[member.request.id]
        self._context -= self._position(member) + 1
        self._offsets = None

    def _position(self, member: Member) -> int:
        """Return the KV entry that the member's row of the next step writes."""
        return member.start + self._launched - member.first

    def _turn_of(self, member: Member) -> dict[str, Member]:
        return self._turns[(member.first - member.start) % len(self._turns)]


def _hold(member: Member) -> HeldPages:
    assert member.request.hold
    return member.request.hold
