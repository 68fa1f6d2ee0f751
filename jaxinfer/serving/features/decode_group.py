"""Decodes that advance together if their tokens are not read: this makes simulations fast.

A step of hundreds of decodes costs what a step of one does, and its results are the same, bit for
bit, as those of one row per request.
"""

from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter

from jaxinfer.serving.batch import Row
from jaxinfer.serving.kv_shards import HeldPages
from jaxinfer.serving.page_pool import PagePool
from jaxinfer.serving.request_state import RequestState

# When so many past steps' times have come together, members take what is theirs.
_TIMES_KEPT = 4096


@dataclass(slots=True, eq=False)
class Member:
    """A request in the group.

    Attributes:
        number: position of the request in the order of admission.
        first, last: numbers of its first step in the group, and of the one that ends it.
        last_launch: number of the last step that it may take part in, by its limit. It takes part
            in those after ``last`` that are launched before that one has ended.
        start: KV entries launched before the first.
        launched, committed: group steps of which its integers know already.
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
    """Running requests of one instance, each of which decodes until it ends.

    Each step of the group is a token for each of them. Their integers stand still meanwhile:
    ``settle`` brings them up to date, and ``leave`` besides takes a request out. The group counts
    its steps, and keeps who ends with which, and who needs a page in which: its requests' positions
    differ by constants.

    Args:
        num_output: output tokens that end a request, ``max_tokens`` or less.
        keep: takes a page that a request has filled into a prefix cache, where there is one.

    Attributes:
        active: the members that the latest step launched advances, or the next one will.
        fresh: members with no step of the group behind them, as of the last call of ``begun``:
            their requests' ``computed`` is as it is; ``num_begun``: how many the others are.
    """

    def __init__(
        self,
        page_size: int,
        num_output: Callable[[RequestState], int],
        keep: Callable[[RequestState], None] | None = None,
    ) -> None:
        self._num_output, self._keep = num_output, keep
        self.active: dict[str, Member] = {}
        self._members: dict[str, Member] = {}
        self.fresh: dict[str, Member] = {}
        # Of the others, the sum of their KV entries less the group's steps that have ended.
        self.num_begun = self._entries = 0
        # Of these and of some that have left, the longest first, by their KV entries less the
        # group's steps, then by their admission; None until somebody asks for it.
        self._longest: list[tuple[int, int, Member]] | None = None
        self._launched = 0
        self._committed = 0
        # When the steps from number _oldest on were done.
        self._times: list[float] = []
        self._oldest = 0
        self._ends: defaultdict[int, dict[str, Member]] = defaultdict(dict)
        self._last_launches: defaultdict[int, dict[str, Member]] = defaultdict(dict)
        # By the number of a step modulo the page size: who may need a page in it.
        self._turns: list[dict[str, Member]] = [{} for _ in range(page_size)]
        # Members left out of further steps, with steps in flight; for the sake of ``keep``.
        self._retired: dict[str, Member] = {}
        self._context = 0
        # Least and most of the active positions, less the group's steps; None if not known.
        self._offsets: tuple[int, int] | None = None
        # By the number of a step in flight: its rows of requests that have left meanwhile, each
        # with the number of the request's admission.
        self._left: dict[int, list[tuple[int, Row]]] = {}
        # The step from which on all whose turn it is need a page: some come with more room.
        self._even_from = 0

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
        """Take a request in, from the next step on; it is the ``number``-th that was admitted."""
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
        """Leave out, before a step, members whose last decode has been launched."""
        for member in self._last_launches.get(self._launched - 1, {}).values():
            if member.request.id in self.active:
                self._deactivate(member)
                self._retired[member.request.id] = member

    def full(self) -> list[tuple[HeldPages, int]]:
        """Return the holds that need a page per slice in the next step, and their entries then."""
        found = []
        for member in self._turns[self._launched % len(self._turns)].values():
            hold, position = member.request.hold, self._position(member)
            assert hold
            if position >= hold.capacity:
                self._settle_pages(member)
                found.append((hold, position + 1))
        return found

    def span(self) -> tuple[int, int]:
        """Return the least and most KV entries that a row of the next step sees, its own included.

        They are looked for only where members have come or gone.
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

    def go_on(self, end: float, pool: PagePool) -> int | None:
        """End the oldest step in flight and launch the next one, if that has the same members.

        Pages are counted alone: holds have them once their members are settled. Returns the KV
        entries that the next step's rows see; None, and no change, where it is another step.
        """
        number, launched, turns = self._committed, self._launched, self._turns
        if (
            self._ends.get(number)
            or self._last_launches.get(launched - 1)
            or self._left
            or launched < self._even_from
        ):
            return None
        growing = len(turns[launched % len(turns)])
        if growing > pool.num_free:
            return None
        self._note_end(end)
        if self._keep and (turns[(number + 1) % len(turns)] or self._retired):
            for member in self._filling(number):
                self._keep(member.request)
        if growing:
            pool.take(growing)
        context = self._context
        self._context = context + len(self.active)
        self._launched = launched + 1
        return context

    def ending(self) -> list[RequestState]:
        """Return the requests that end with the oldest step in flight: they are to leave."""
        return [member.request for member in self._ends.get(self._committed, {}).values()]

    def commit(self, end: float) -> list[tuple[int, Row]]:
        """A step has ended.

        Returns:
            The step's rows of requests that have left since it was launched, each with the number
            of the request's admission, in this order; with an empty row of each that has filled a
            page which is to be kept.
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
        times = self._times
        times.append(end)
        if len(times) == _TIMES_KEPT:
            self.settle()
            times.clear()
            self._oldest = self._committed

    def leave(self, request: RequestState) -> None:
        """Settle a member and take it out; of steps in flight, it has rows from now on."""
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
        """KV entries of all members but the fresh ones.

        Takes time proportional to the fresh requests; updates no request's integers.
        """
        while self.fresh and (member := next(iter(self.fresh.values()))).first < self._committed:
            del self.fresh[member.request.id]
            self.num_begun += 1
            self._entries += member.start - member.first
            if self._longest is not None:
                self._insert(self._longest, member)
        return self._entries + self.num_begun * self._committed

    def longest(self, most: int, but: Container[str] = ()) -> list[tuple[int, int, str]]:
        """KV entries, admissions and ids of the ``most`` that have the most entries.

        The longest first, of equal ones the first admitted; of those that ``begun`` counts.

        Args:
            but: ids to be left out, from now on.
        """
        self.begun()
        there = self._longest
        if there is None or len(there) > 2 * len(self._members) + 64:  # Mostly of those who left.
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
        """Bring all members' integers, tokens and times up to date."""
        for member in self._members.values():
            self._settle(member)

    def _settle(self, member: Member) -> None:
        request, stop = member.request, member.last_launch + 1
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
        """Give a hold the pages that ``go_on`` has counted for it."""
        assert member.request.hold
        launched = min(self._launched, member.last_launch + 1)
        member.request.hold.has_taken(member.start + launched - member.first)

    def _deactivate(self, member: Member) -> None:
        del self.active[member.request.id]
        del self._turn_of(member)[member.request.id]
        self._context -= self._position(member) + 1
        self._offsets = None

    def _position(self, member: Member) -> int:
        """The KV entry that the member's row of the next step writes."""
        return member.start + self._launched - member.first

    def _turn_of(self, member: Member) -> dict[str, Member]:
        return self._turns[(member.first - member.start) % len(self._turns)]
