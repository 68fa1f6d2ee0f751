"""Decodes that advance together while their tokens are not read, to speed up simulations.

A step of hundreds of decodes costs as much simulation time as a step of one. Results are the same,
bit for bit, as with one row per request.
"""

from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from operator import itemgetter

from jaxinfer.serving.batch import Row
from jaxinfer.serving.kv_shards import HeldPages
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
        last_launch: number of the last step that its limit lets it take part in. The request takes
            part in steps after ``last`` that are launched before ``last`` has ended.
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

    Attributes:
        active: members that the latest launched step advances, or that the next step will.
        fresh: members that had completed no step of the group at the last call of ``begun``; their
            requests' ``computed`` is up to date.
        num_begun: number of all other members.
    """

    def __init__(self, page_size: int, num_output: Callable[[RequestState], int]) -> None:
        self._num_output = num_output
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
        self._context = 0
        # Smallest and largest active position, minus the number of the group's steps; None if
        # unknown.
        self._offsets: tuple[int, int] | None = None
        # For each step in flight, the rows of requests that have left since, each with the number
        # of the request's admission.
        self._left: dict[int, list[tuple[int, Row]]] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, request: RequestState) -> bool:
        """Tell whether the request is advanced here."""
        return request.id in self._members

    def takes(self, request: RequestState) -> bool:
        """Tell whether a running request has only to decode, one token after the other."""
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

    def retire(self) -> None:
        """Before a step, deactivate members whose last decode has been launched."""
        for member in self._last_launches.get(self._launched - 1, {}).values():
            if member.request.id in self.active:
                self._deactivate(member)

    def full(self) -> list[tuple[HeldPages, int]]:
        """Return the holds that need a page per slice in the next step, and their next size."""
        found = []
        for member in self._turns[self._launched % len(self._turns)].values():
            hold, position = member.request.hold, self._position(member)
            assert hold
            if position >= hold.capacity:
                found.append((hold, position + 1))
        return found

    def span(self) -> tuple[int, int]:
        """Return the least and most KV entries that a row of the next step sees, its own included.

        They are computed again only after members have joined or left.
        """
        if self._offsets is None:
            offsets = [member.start - member.first for member in self.active.values()]
            self._offsets = min(offsets), max(offsets)
        least, most = self._offsets
        return least + self._launched + 1, most + self._launched + 1

    def launch(self, full: Sequence[tuple[HeldPages, int]]) -> tuple[int, int]:
        """Start a step; the caller has checked that its pages fit.

        Returns:
            The number of the step's rows, and the KV entries that they see, their own included.
        """
        for hold, num_tokens in full:
            grown = hold.grow(num_tokens)
            assert grown, "the room was counted before"
        rows, context = len(self.active), self._context
        self._context += rows
        self._launched += 1
        return rows, context

    def ending(self) -> list[RequestState]:
        """Return the requests that end with the oldest step in flight and must leave the group."""
        return [member.request for member in self._ends.get(self._committed, {}).values()]

    def commit(self, end: float) -> list[tuple[int, Row]]:
        """Commit a step that has ended.

        Returns:
            The step's rows of requests that have left since its launch, each with its number in the
            order of admission, in this order.
        """
        number = self._committed
        self._times.append(end)
        self._committed += 1
        self._ends.pop(number, None)
        if len(self._times) == _TIMES_KEPT:
            self.settle()
            self._times.clear()
            self._oldest = self._committed
        return sorted(self._left.pop(number, ()), key=itemgetter(0))

    def leave(self, request: RequestState) -> None:
        """Update a member and take it out; in steps in flight, it gets a row of its own."""
        member = self._members.pop(request.id)
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
