"""Accounts of ``Takeover``: the last known state of each instance, and totals over equal instances.

An account is updated at its instance's own events, and by the system's decisions between them, so
that no decision reads all requests of all instances.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import exp, inf

from jaxinfer.papers.takeover.speeds import Speeds
from jaxinfer.serving.views import InstanceView, Leg, StepView
from jaxinfer.systems.instances import capacity

# An instance with a pool smaller than this share of another's hands its longest decodes to it.
_SMALL = 0.25
# Seconds over which the share of time with prompts is averaged.
_MEMORY_S = 20.0
# Number of steps of prompts that an instance may queue: one runs, and one is launched next.
_STEPS_AHEAD = 2
# Number of steps of growth for which takes leave room.
_GROWTH_STEPS = 32
# An instance has ample room if more than this share of its seats and of its pool is free.
AMPLE = 0.5
# An instance that computes prompts for a smaller share of its time could compute more.
_BUSY = 0.9


@dataclass(eq=False, slots=True)
class InstanceClass:
    """Instances of one kind, and totals over them.

    Attributes:
        entries_held: number of KV entries that a pool can hold.
        decodes: number of running decodes.
        entries: KV entries of these decodes.
        due: KV entries of all requests once their prompts are computed.
        seats: number of seats that are neither used nor promised.
        room: number of KV entries that are neither used nor promised, without those to keep free.
        all_seats: number of all seats.
        all_room: number of all KV entries.
        with_time: number of instances that could compute more prompts.
        givers: instances that may have a decode to take over.
        slowest: upper bound on the step times of givers, in seconds.
        fastest: lower bound on the step times of instances with room, in seconds.
        below: kinds whose pools are small compared with this kind's.
        is_below: whether this kind is in another one's ``below``.
        outlets: kinds whose pools allow them to take over decodes of this kind.
        inlets: kinds whose decodes this kind's pools allow it to take over.
    """

    speeds: Speeds
    entries_held: int
    books: list["Account"] = field(default_factory=list)
    decodes: int = 0
    entries: int = 0
    due: int = 0
    seats: int = 0
    room: int = 0
    all_seats: int = 0
    all_room: int = 0
    with_time: int = 0
    givers: set["Account"] = field(default_factory=set)
    slowest: float = 0.0
    fastest: float = inf
    below: list["InstanceClass"] = field(default_factory=list)
    is_below: bool = False
    outlets: list["InstanceClass"] = field(default_factory=list)
    inlets: list["InstanceClass"] = field(default_factory=list)

    def is_small(self, beside: "InstanceClass") -> bool:
        """Tell whether these pools are so small that decodes may have to leave them."""
        return self.entries_held < _SMALL * beside.entries_held

    def slower_than(self, step_s: float) -> list["Account"]:
        """Return givers whose steps take longer; call it only if ``slowest`` exceeds ``step_s``."""
        self.slowest = max((each.step_s for each in self.givers), default=0.0)
        return [each for each in self.givers if each.step_s > step_s]

    def faster_than(self, step_s: float, times: float) -> list["Account"]:
        """Return instances with room whose steps are more than ``times`` times shorter."""
        if step_s <= times * self.fastest:
            return []
        takers = [each for each in self.books if each.has_room]
        self.fastest = min((each.step_s for each in takers), default=inf)
        return [each for each in takers if step_s > times * each.step_s]


@dataclass(eq=False, slots=True)
class Account:
    """The last known state of an instance.

    Attributes:
        legs: legs of a request that runs entirely on the instance.
        number: number in the order of instances.
        widest: largest number of tokens of a step.
        budget: largest number of tokens of a narrow step.
        most_seats: largest number of requests at a time.
        most_backlog: number of uncomputed prompt tokens above which no further prompt begins here.
        pages: number of pages of its pool.
        spared: number of pages to keep free, even with few decodes.
        decodes: number of running decodes.
        entries: KV entries of these decodes.
        backlog: number of prompt tokens to be computed.
        due: KV entries of all requests once their prompts are computed.
        seats: number of seats that are neither used nor promised.
        room: number of pages that are neither used nor promised, without those to keep free.
        idle: whether the instance had no requests.
        coming: pages of requests that will come and are still elsewhere, by id.
        to_compute: uncomputed prompt tokens of requests that will come, by id.
        under_way: partly computed prompts while few requests wait, by id, the oldest first:
            arrival, tokens left, known tokens, and largest number of KV entries.
        told: prompt tokens per step, as last sent to the instance; None for no limit.
        limit: number of prompt tokens per step over which prompts are spread; 0 for no limit.
        for_ttft: whether this limit exceeds what the target for TBT allows, because the target for
            TTFT is at risk.
        stay: requests whose decodes are no longer taken over, or that are bound for elsewhere.
        spent: requests among these that were taken over as often as allowed while others wait.
        longest: KV entries of the longest decode that may be taken over, as last found: 0 if there
            is none, None if unknown since.
        step_s: seconds of a step of the running decodes, without prompts.
        token_s: seconds of a prompt token in such a step; None if not computed yet.
        attention_s: seconds for which the next chunk attends to the computed part of its prompt;
            used with a target for TBT.
        is_open: whether a prompt may begin here, unless it is too long.
        has_room: whether the instance could take over a decode that is not too long.
        busy: share of the instance's time in which it computed prompts.
        seen: end of the instance's last step, in seconds.
        open_to: accounts that were open at their last update, by name.
    """

    view: InstanceView
    name: str
    legs: tuple[Leg, ...]
    number: int
    kind: InstanceClass
    widest: int
    budget: int
    most_backlog: int
    page_size: int
    most_seats: int
    pages: int
    spared: int
    decodes: int = 0
    entries: int = 0
    backlog: int = 0
    due: int = 0
    seats: int = 0
    room: int = 0
    idle: bool = True
    coming: dict[str, int] = field(default_factory=dict)
    to_compute: dict[str, int] = field(default_factory=dict)
    under_way: dict[str, tuple[float, int, int, int]] = field(default_factory=dict)
    told: int | None = None
    limit: int = 0
    for_ttft: bool = False
    stay: int = 0
    spent: dict[str, None] = field(default_factory=dict)
    longest: int | None = 0
    step_s: float = 0.0
    attention_s: float = 0.0
    token_s: float | None = None
    is_open: bool = True
    has_room: bool = True
    busy: float = 1.0
    seen: float = 0.0
    open_to: dict[str, "Account"] = field(default_factory=dict)

    def of(self, kind: InstanceClass, number: int) -> "Account":
        """Add the instance to a kind, whose totals first count it at its next update."""
        self.kind, self.number = kind, number
        self.decodes = self.entries = self.due = self.seats = self.room = 0
        return self

    def pages_for(self, entries: int) -> int:
        """Return the number of pages that hold ``entries`` KV entries."""
        return -(-entries // self.page_size)

    def renew(self) -> None:
        """Update the account to the instance's present state."""
        view, kind, size, coming = self.view, self.kind, self.page_size, self.coming
        running, decodes, entries, kv_entries, backlog = view.counts
        pending = len(view.waiting) + len(view.importing)
        there = pending + running
        seats = self.most_seats - there
        room = view.num_free_pages - self.spared + -_GROWTH_STEPS * decodes // size
        if pending:
            room -= view.num_awaited_pages
        if coming:
            seats -= len(coming)
            room -= sum(coming.values())
            if self.to_compute:
                backlog += sum(self.to_compute.values())
        due = kv_entries + backlog
        kind.decodes += decodes - self.decodes
        kind.entries += entries - self.entries
        kind.due += due - self.due
        kind.seats += seats - self.seats
        kind.room += (room - self.room) * size
        self.decodes, self.entries, self.backlog, self.due = decodes, entries, backlog, due
        self.seats, self.room = seats, room
        self.idle = not there and not coming
        # Some of those that stay may not run yet.
        longest = None if decodes and decodes > self.stay - pending else 0
        if longest != self.longest:
            self.look(longest)
        self.conclude()
        if self.is_open:
            self.open_to[self.name] = self
        elif self.name in self.open_to:
            del self.open_to[self.name]

    def widen(self, wide: bool) -> None:
        """Let steps be as wide as possible, or else narrow."""
        self.most_backlog = _STEPS_AHEAD * (self.widest if wide else self.budget)

    @property
    def is_ample(self) -> bool:
        """True if more than half of the seats and of the pool are free."""
        return self.seats > AMPLE * self.most_seats and self.room > AMPLE * self.pages

    def look(self, longest: int | None) -> None:
        """Record the KV entries of the longest decode that may be taken over."""
        self.longest = longest
        if longest == 0:
            self.kind.givers.discard(self)
        else:
            self.kind.givers.add(self)

    def conclude(self) -> None:
        """Update the values that are derived from others."""
        kind, seat, entries = self.kind, self.seats > 0, self.entries
        speeds = kind.speeds
        self.token_s = None
        step_s = speeds.step_s + (speeds.sequence_s * self.decodes + speeds.entry_s * entries)
        self.step_s = step_s
        self.is_open = self.idle or (seat and self.backlog < self.most_backlog)
        if step_s > kind.slowest and self.longest != 0:
            kind.slowest = step_s
        self.has_room = seat and self.room > 0
        if self.has_room and step_s < kind.fastest:
            kind.fastest = step_s

    def seconds(self, tokens: int) -> float:
        """Return the seconds until ``tokens`` of a prompt are computed, after earlier prompts."""
        if self.token_s is None:
            speeds = self.kind.speeds
            full_s = speeds.full_s + speeds.full_entry_s * self.entries
            self.token_s = max(full_s / max(self.budget - self.decodes, 1), speeds.token_s)
        return (self.backlog + tokens) * self.token_s

    def note(self, step: StepView) -> None:
        """Record a step that has ended, and whether it had a chunk of a prompt."""
        start, had_time, chunk = self.seen, self.busy < _BUSY, False
        for row in step.rows:
            if row.start < row.request.prompt_len:
                chunk = True
                break
        if step.start > start:
            start = step.start
            self.busy *= exp((self.seen - start) / _MEMORY_S)  # For as long as it did nothing.
        kept = exp((start - step.end) / _MEMORY_S)
        self.busy = self.busy * kept + chunk * (1 - kept)
        self.seen = step.end
        self.kind.with_time += (self.busy < _BUSY) - had_time

    def take(self, pages: int, backlog: int = 0) -> None:
        """Promise a seat and pages to a request with ``backlog`` prompt tokens to compute."""
        self.seats -= 1
        self.room -= pages
        self.backlog += backlog
        self.kind.seats -= 1
        self.kind.room -= pages * self.page_size
        self.idle = False


class Accounts:
    """The accounts of all existing instances.

    Args:
        spared: share of a pool to keep free.
        narrow: share of a step's tokens that a narrow step has.

    Attributes:
        views: views of these instances.
        by_name: accounts in the order of instances.
        kinds: kinds of equal instances.
        open_to: accounts whose instances could begin a prompt, if there is room.
        largest: the first account with the largest pool.
    """

    def __init__(self, spared: float, narrow: float = 1.0) -> None:
        self._spared, self._narrow = spared, narrow
        self.views: dict[str, InstanceView] = {}
        self.by_name: dict[str, Account] = {}
        self.kinds: list[InstanceClass] = []
        self.open_to: dict[str, Account] = {}
        self.largest: Account

    @property
    def mean_context(self) -> float:
        """Mean number of KV entries that a decode sees."""
        decodes = entries = 0
        for kind in self.kinds:
            decodes += kind.decodes
            entries += kind.entries
        return entries / decodes if decodes else 0.0

    def follow(self, instances: Mapping[str, InstanceView]) -> None:
        """Make new accounts for the present instances."""
        seen, self.views = self.views, dict(instances)
        before, self.by_name = self.by_name, {}
        self.open_to.clear()
        kinds: dict[tuple[object, ...], InstanceClass] = {}
        for name, view in instances.items():
            assert view.fit
            held, widest = capacity(view), view.max_num_batched_tokens
            key = view.fit, held, widest, view.max_num_seqs
            kind = kinds.setdefault(key, InstanceClass(Speeds.of(view.fit, self._narrow), held))
            if seen.get(name) is view:
                book = before[name].of(kind, len(self.by_name))
            else:
                spared = int(self._spared * view.num_pages)
                budget = max(int(self._narrow * widest), 1)
                book = Account(
                    view=view,
                    name=name,
                    legs=(Leg(name),),
                    number=len(self.by_name),
                    kind=kind,
                    widest=widest,
                    budget=budget,
                    most_backlog=_STEPS_AHEAD * budget,
                    page_size=view.page_size,
                    most_seats=view.max_num_seqs,
                    pages=view.num_pages,
                    spared=spared,
                    open_to=self.open_to,
                )
            kind.with_time += book.busy < _BUSY
            kind.books.append(book)
            kind.all_seats += book.most_seats
            kind.all_room += book.pages * book.page_size
            self.by_name[name] = book
            book.renew()
        self.kinds = list(kinds.values())
        for kind in self.kinds:
            kind.below = [each for each in self.kinds if each.is_small(kind)]
        for kind in self.kinds:
            kind.is_below = any(kind in each.below for each in self.kinds)
            kind.outlets = [e for e in self.kinds if e is not kind and e not in kind.below]
            kind.inlets = [e for e in self.kinds if e is not kind and kind not in e.below]
        self.largest = max(self.by_name.values(), key=lambda book: book.kind.entries_held)
