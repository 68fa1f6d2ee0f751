"""Takeover: free instances compute whole prompts; the best instances take over decodes.

No prompt is split in advance, and no length is predicted. While requests wait, an instance takes
over decodes from instances where a decode displaces more of the waiting prompts. An instance with a
small pool keeps its short decodes and hands over the longest ones when it needs room for the next
prompt. While few requests wait, decodes and partly computed prompts move from slower to faster
instances, and steps with decodes have few prompt tokens. ``docs/results/takeover.md`` has the
results.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from math import inf

from pydantic import Field

from jaxinfer.papers.takeover import prompts as takeover_prompts
from jaxinfer.papers.takeover.accounts import AMPLE, Account, Accounts, InstanceClass
from jaxinfer.papers.takeover.slo import Slo, StepsBesideTarget, attention_s
from jaxinfer.papers.takeover.takes import Takes
from jaxinfer.serving.system import Action, Assignment, Budget, System
from jaxinfer.serving.views import ClusterView, InstanceView, Leg, RequestView, StepView
from jaxinfer.systems.by_cache import ByCacheOptions, CachedParts
from jaxinfer.systems.instances import most_entries

# A decode moves if it displaces less elsewhere by this factor; one of a small pool may displace
# slightly more.
_LESS, _LITTLE_MORE = 0.95, 1.1
# A large instance starts prompts, too, if decodes of small pools displace this much more.
_FAR_MORE = 2.0
# Its steps must be shorter by this factor while few requests wait.
_SHORTER = 1.3
# If an instance has fewer free seats than this per decode of small pools, they are kept for these.
_SCARCE = 0.25


class TakeoverOptions(ByCacheOptions):
    """Options of ``Takeover``.

    Attributes:
        spared: Share of a KV pool that takeovers leave free, in addition to room for the growth of
            the decodes there.
        most_moves: Largest number of times that one request may be taken over while others wait;
            with 0, decodes are never taken over. While few wait, decodes that reached this number
            move only to faster kinds of instances.
        narrow: Share of the token budget that a step may use (decodes included) while few requests
            wait, or while at least half of the instance's ``max_num_seqs`` or KV pool is in use.
        keeps_room: Whether prompts start on other instances while an instance reserves room for
            decodes that it will take over.
        slo: Targets in seconds for ``ttft`` and ``tbt``: prompts get fewer tokens per step when TBT
            is at risk, and more when TTFT is at risk; with ``ttft``, running prompts are taken over
            only if some would be late. ``ttft`` alone counts while few wait.
    """

    spared: float = Field(default=0.01, ge=0, lt=1)
    most_moves: int = Field(default=2, ge=0)
    narrow: float = Field(default=1.0, gt=0, le=1)
    keeps_room: bool = True
    slo: Slo = Slo()


class Takeover(System):
    """Requests begin on free instances, and other instances take them over while they decode."""

    Options = TakeoverOptions
    options: TakeoverOptions
    needs_fits = True
    # Views count decodes, because a simulation may advance them together.
    needs_decode_rows = False

    def __init__(self, options: TakeoverOptions | None = None) -> None:
        super().__init__(options)
        self._books = Accounts(self.options.spared, self.options.narrow)
        self._seen: Mapping[str, InstanceView] = {}
        # Whether more requests wait than there are instances; KV entries of the first one, or 0.
        self._waits, self._next = False, 0
        # Whether instances were lost or came back since requests were last routed.
        self._changed = False
        # Instances that may have prompts while few requests wait.
        self._holders: dict[str, Account] = {}
        self._takes = Takes(self._books, self.options.most_moves)
        self._beside = StepsBesideTarget()
        # If many wait: arrivals of the first and the last, and the prompt tokens up to each.
        self._line: list[tuple[float, int]] = []

    def _follow(self, cluster: ClusterView) -> None:
        """Keep accounts of the present instances."""
        self._seen = cluster.instances
        if cluster.instances != self._books.views:  # One was lost or is back.
            self._books.follow(cluster.instances)
            self._holders, self._changed = {}, True
            there = self._books.by_name
            for name, book in [*self._takes.fixed.items(), *self._takes.bound_for.items()]:
                if there.get(book.name) is not book:
                    self._takes.put(name, None)

    # Instances on which requests start.

    def route(self, waiting: Collection[RequestView], cluster: ClusterView) -> Sequence[Assignment]:
        """Assign requests in order, each to where it is computed first, while there is room."""
        if cluster.instances is not self._seen:
            self._follow(cluster)
        books, largest = self._books.by_name, self._books.largest
        if self._changed:
            self._changed = False
            for request in waiting:  # Some return from a lost instance.
                self._takes.put(request.id, None)
        if self._takes.stale:
            for name in self._takes.stale:
                if book := books.get(name):
                    book.renew()
            self._takes.stale.clear()
        open_to = list(self._books.open_to.values())
        if self._waits and open_to:
            kept = [kind for kind in self._books.kinds if kind.below and self._is_kept(kind)]
            open_to = [book for book in open_to if book.idle or book.kind not in kept]
        assignments: list[Assignment] = []
        self._next = 0
        for request in waiting:
            known, most, here = request.num_known, most_entries(request), request.held_by
            if most > largest.kind.entries_held:  # The loop reports why it ends.
                assignments.append(Assignment(request.id, largest.legs))
                continue
            rest, book = known - request.computed, None
            parts = CachedParts.of(self.options, request, cluster)
            if here:
                book = books.get(here)
            elif open_to:
                book = self._place(known, rest, open_to, parts)
            if book is None:
                self._next = known
                break
            book.take(0 if here else book.pages_for(known), rest - parts.spared(book.name))
            book.conclude()
            if request.id in self._takes.moves:
                self._takes.put(request.id, book)
            assignments.append(Assignment(request.id, self._legs(book, known, most)))
            if not book.is_open:
                book.open_to.pop(book.name, None)
        self._waits = len(waiting) - len(assignments) > len(books)
        if self.options.slo.tbt is not None and self.options.slo.ttft is not None:
            left = list(islice(waiting, len(assignments), None)) if self._waits else []
            tokens = sum(request.num_known - request.computed for request in left)
            self._line = [(left[0].arrival, 0), (left[-1].arrival, tokens)] if left else []
        return assignments

    def _place(
        self, known: int, rest: int, open_to: Sequence[Account], parts: CachedParts
    ) -> Account | None:
        """Choose an instance for the rest of a prompt; None if the request has to wait."""
        best, least = None, inf
        waits, cost, slo = self._waits, takeover_prompts.cost, self.options.slo
        for book in open_to:
            room = book.pages if book.idle else book.room
            if book.is_open and room * book.page_size >= known:
                left = rest - parts.spared(book.name)
                seconds = book.seconds(left) if waits else cost(book, left, slo)
                if seconds < least:
                    best, least = book, seconds
        return best

    def _legs(self, book: Account, known: int, most: int) -> tuple[Leg, ...]:
        """Return a leg for a whole request or, if it cannot end here, for the known tokens."""
        largest = self._books.largest
        if book.kind.entries_held >= most or book.kind is largest.kind:
            return book.legs
        return Leg(book.name, known, "when_room"), Leg(largest.name)

    def _is_kept(self, kind: InstanceClass) -> bool:
        """Tell whether these instances' room is kept for decodes of smaller pools."""
        if not self.options.keeps_room or not self._takes.most_moves:
            return False
        context, decodes, due = self._books.mean_context, 0, 0
        for each in kind.below:
            if self._gives(each, kind, context):
                decodes, due = decodes + each.decodes, due + each.due
        if decodes and (kind.seats <= _SCARCE * decodes or kind.room <= due):
            return True
        if kind.seats > AMPLE * kind.all_seats and kind.room > AMPLE * kind.all_room:
            return False
        return any(
            each.with_time
            and self._next <= each.entries_held
            and _displaced_by(each, kind, context) < _FAR_MORE
            for each in kind.below
        )

    # For each instance, the instances whose decodes it takes.

    def on_step(self, step: StepView, cluster: ClusterView) -> Sequence[Action]:
        """Let this instance take over decodes from others, and others take over this instance's."""
        if cluster.instances is not self._seen:
            self._follow(cluster)
        book = self._books.by_name.get(step.instance)
        if book is None:
            return ()
        if book.kind.is_below:
            book.note(step)
        tbt = self.options.slo.tbt
        if tbt is not None:
            self._beside.note(book, step, tbt)
            book.attention_s = attention_s(book, step)
        book.renew()
        actions: list[Action] = []
        if self._waits:
            book.under_way.clear()
        else:
            takeover_prompts.note(book, step)
            if book.under_way:
                self._holders[book.name] = book
            elif self._holders:
                self._holders.pop(book.name, None)
        if self._takes.most_moves:
            if self._holders and not self._waits:
                self._take_prompt(book, cluster, actions)
            self._take_decodes(book, actions)
        if book.limit or book.backlog or book.told != self._full(book):
            self._spread(book, cluster.now, actions)
        return actions

    def _spread(self, book: Account, now: float, actions: list[Action]) -> None:
        """Limit the prompt tokens of the next step, unless many requests wait and room is ample."""
        limit, slo, book.for_ttft = 0, self.options.slo, False
        if not self._waits:
            limit = takeover_prompts.limit(book, book.backlog, slo, now)
        elif slo.tbt is not None:
            speed = sum(len(kind.books) / kind.speeds.token_s for kind in self._books.kinds)
            share = 1 / (book.kind.speeds.token_s * speed)
            behind = [(arrival, round(share * tokens)) for arrival, tokens in self._line]
            limit = takeover_prompts.limit(book, book.backlog, slo, now, behind)
        book.limit = limit
        is_wide = self._waits and slo.tbt is None and book.is_ample
        book.widen(is_wide)
        told = None if is_wide else limit or self._full(book)
        if told != book.told:
            book.told = told
            actions.append(Budget(book.name, told))

    def _full(self, book: Account) -> int | None:
        """Return the prompt tokens of a full narrow step; None if no step is narrow."""
        if book.budget == book.widest:
            return None
        return max(book.budget - (book.decodes if book.backlog else 0), 1)

    def _take_prompt(self, book: Account, cluster: ClusterView, actions: list[Action]) -> None:
        """Take over a partly computed prompt."""
        holders, open_to = self._holders.values(), self._books.open_to.values()
        found = takeover_prompts.best_take(book, holders, open_to, cluster, self.options.slo)
        if found:
            self._takes.take_prompt(*found, actions)

    def _take_decodes(self, book: Account, actions: list[Action]) -> None:
        """Move decodes from other instances here, and from here to others."""
        if book.has_room:
            for others in self._worse(book):
                self._takes.longest_of(others, book, actions)
        if book.longest != 0:
            for other in self._better(book):
                if book.longest == 0:
                    break
                self._takes.take(other, book, actions)
            if self._next and book.kind.is_below:
                self._make_room(book, actions)
        if book.spent and not self._waits:
            own_s = book.kind.speeds.step_s
            for other in self._better(book):
                if other.kind.speeds.step_s < own_s:
                    self._takes.take_spent(other, book, actions)

    def _gives(self, kind: InstanceClass, to: InstanceClass, context: float) -> bool:
        """Tell whether decodes with this context are better there, while requests wait."""
        if not kind.decodes:
            return False
        most = _LITTLE_MORE if kind in to.below else _LESS
        return _displaced_by(kind, to, context) < most

    def _worse(self, book: Account) -> Sequence[Collection[Account]]:
        """Return the instances whose decodes this one takes over: the worst first, equal ones
        together.
        """
        if not self._waits:
            most, givers = _SHORTER * book.step_s, []
            for kind in self._books.kinds:
                if kind.slowest > most:
                    givers += kind.slower_than(most)
            if not givers:
                return ()
            givers.sort(key=lambda each: (-each.step_s, each.number))
            return [[each] for each in givers]
        kinds = [kind for kind in book.kind.inlets if kind.givers]
        if not kinds:
            return ()
        context = self._books.mean_context
        kinds = [kind for kind in kinds if self._gives(kind, book.kind, context)]
        kinds.sort(key=lambda kind: kind.speeds.displaced(context), reverse=True)
        return [kind.givers for kind in kinds]

    def _better(self, book: Account) -> Iterable[Account]:
        """Return the instances that take over this one's decodes, the best first."""
        if not self._waits:
            takers: list[Account] = []
            for kind in self._books.kinds:
                takers += kind.faster_than(book.step_s, _SHORTER)
            takers.sort(key=lambda each: (each.step_s, each.number))
            return takers
        if not book.kind.outlets:
            return []
        context = self._books.mean_context
        kinds = [kind for kind in book.kind.outlets if self._gives(book.kind, kind, context)]
        if len(kinds) > 1:
            kinds.sort(key=lambda kind: kind.speeds.displaced(context))
        return (each for kind in kinds for each in kind.books if each.has_room)

    def _make_room(self, book: Account, actions: list[Action]) -> None:
        """Hand decodes over to a larger pool, so that the next prompts can begin here."""
        if self._next > book.kind.entries_held:
            return
        # As if all requests that start before the next step were as long as the first one.
        prompts = max(-(-(book.most_backlog - book.backlog) // self._next), 1)
        each_decode = book.pages_for(-(-book.entries // max(book.decodes, 1)))
        lacking = max(
            prompts * book.pages_for(self._next) - book.room, (prompts - book.seats) * each_decode
        )
        if lacking <= 0:
            return
        larger = [
            each
            for kind in self._books.kinds
            if book.kind in kind.below
            for each in kind.books
            if each.has_room
        ]
        if larger:
            most = max(larger, key=lambda each: each.room)
            self._takes.take(most, book, actions, lacking)

    def on_leg_end(self, request: RequestView, leg: Leg, cluster: ClusterView) -> None:
        """Count a request on the instance to which it is on its way."""
        if cluster.instances is not self._seen:
            self._follow(cluster)
        legs = request.legs
        self._takes.put(request.id, self._books.by_name[legs[0].instance] if legs else None)
        self._takes.stale[leg.instance] = None

    def on_finish(self, request: RequestView, cluster: ClusterView) -> None:
        """Forget a request."""
        self._takes.put(request.id, None)
        self._takes.moves.pop(request.id, None)

    def report(self) -> Mapping[str, object]:
        """Return how many decodes and how many prompts were taken over."""
        taken = {"decodes_taken": self._takes.decodes, "prompts_taken": self._takes.prompts}
        if self.options.slo.tbt is None:
            return taken
        return taken | {"steps_beside_tbt": self._beside.report()}


def _displaced_by(kind: InstanceClass, to: InstanceClass, context: float) -> float:
    """Return what a decode with ``context`` entries displaces there, relative to here."""
    return to.speeds.displaced(context) / kind.speeds.displaced(context)
