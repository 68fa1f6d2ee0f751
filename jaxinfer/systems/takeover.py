"""Takeover: whole prompts on whoever is free; decodes are taken over by whoever is best at them.

No prompt is cut ahead of time, and no length is predicted. While requests wait, an instance takes
the decodes of those on which a decode displaces more of the prompts that wait. One with a small
pool keeps its short decodes and hands on the longest ones, as it needs room for the next prompt.
While none waits, decodes go from slower instances to faster ones. ``docs/results/takeover.md`` says
what comes of it.
"""

from collections.abc import Collection, Mapping, Sequence

from pydantic import Field

from jaxinfer.options.validation import Options
from jaxinfer.serving.system import (
    Action,
    Assignment,
    ClusterView,
    InstanceView,
    Leg,
    Reassign,
    RequestView,
    StepView,
    System,
)
from jaxinfer.systems.instances import most_entries
from jaxinfer.systems.takeover_books import Book, Books, Kind

# By how much a decode has to displace less elsewhere; for a small pool's it may be a little more.
_LESS, _LITTLE_MORE = 0.95, 1.1
# By how much its steps have to be shorter, while nobody waits.
_SHORTER = 1.3
# Free seats by the decodes of small pools, from which on they are left for these.
_SCARCE = 0.25
# With more than this share of its seats and of its pool free, a large one begins prompts, too.
_AMPLE = 0.5
# Decodes of an instance that are taken in one step, at most: a few are looked at first.
_AT_ONCE = 2, 30


class TakeoverOptions(Options):
    """Options of ``Takeover``.

    Attributes:
        spared: Share of a pool that takes leave free, besides room for its decodes' growth.
        most_moves: Takes of one request, at most; with 0, no decode is taken.
        keeps_room: Begin prompts elsewhere while an instance's room is for others' decodes.
    """

    spared: float = Field(default=0.01, ge=0, lt=1)
    most_moves: int = Field(default=2, ge=0)
    keeps_room: bool = True


class Takeover(System):
    """Requests begin on whoever is free, and are taken over while they decode."""

    Options = TakeoverOptions
    options: TakeoverOptions
    needs_fits = True
    needs_decode_rows = False  # Views count decodes: a simulation may advance them together.

    def __init__(self, options: TakeoverOptions | None = None) -> None:
        super().__init__(options)
        self._books = Books(self.options.spared)
        self._seen: Mapping[str, InstanceView] = {}
        # Whether requests wait, and the KV entries of the first of them.
        self._waits, self._next = False, 0
        # Whether instances were lost, or came back, since requests were last routed.
        self._changed = False
        # Who would begin a prompt, if there is room.
        self._open: dict[str, Book] = {}
        # By request: its takes, and who is to have it; the order is that of the takes.
        self._moves: dict[str, int] = {}
        self._bound_for: dict[str, Book] = {}
        # Who is not to be taken: what is bound for somebody, or has been taken often enough; of
        # these, where they are.
        self._fixed: set[str] = set()
        self._home: dict[str, str] = {}
        # Who has handed something on since its last step: it may have none to come.
        self._stale: dict[str, None] = {}
        self._taken = 0

    def _follow(self, cluster: ClusterView) -> None:
        """Keep books of the instances that are there now."""
        self._seen = cluster.instances
        if cluster.instances != self._books.views:  # One was lost, or is back.
            self._books.follow(cluster.instances)
            self._open, self._changed = {}, True
            for book in self._books.by_name.values():
                self._note_open(book)

    # Where requests begin.

    def route(self, waiting: Collection[RequestView], cluster: ClusterView) -> Sequence[Assignment]:
        """Requests in their order, each where it is computed first, while there is room."""
        if cluster.instances is not self._seen:
            self._follow(cluster)
        books = self._books.by_name
        for name in self._stale:
            if book := books.get(name):
                book.renew(cluster.instances[name])
                self._note_open(book)
        self._stale.clear()
        open_to = list(self._open.values())
        if self._waits and open_to:
            kept = [kind for kind in self._books.kinds if kind.below and self._is_kept(kind)]
            open_to = [book for book in open_to if book.idle or book.kind not in kept]
        assignments: list[Assignment] = []
        left = False
        if self._changed:
            self._changed = False
            for request in waiting:  # Some come back from an instance that was lost.
                self._return(request.id)
        for request in waiting:
            book = books.get(request.held_by or "") or self._place(request, open_to)
            if book is None:
                left, self._next = True, request.num_known
                break
            pages = 0 if request.held_by == book.name else book.pages_for(request.num_known)
            book.take(pages, request.num_known - request.computed)
            book.conclude()
            assignments.append(Assignment(request.id, self._legs(request, book)))
            if not book.is_open:
                self._note_open(book)
        self._waits = left
        return assignments

    def _note_open(self, book: Book) -> None:
        if book.is_open:
            self._open[book.name] = book
        else:
            self._open.pop(book.name, None)

    def _place(self, request: RequestView, open_to: Sequence[Book]) -> Book | None:
        """Choose the instance that is to compute a request; None if it has to wait."""
        known = request.num_known
        rest, best, least = known - request.computed, None, float("inf")
        for book in open_to:
            room = book.pages if book.idle else book.room
            if room * book.page_size < known or not book.is_open:
                continue
            seconds = (book.backlog + rest) * book.token_s()
            if seconds < least:
                best, least = book, seconds
        largest = self._books.largest
        if best is None and known > largest.kind.entries_held:
            return largest  # The loop says why it cannot be.
        return best

    def _legs(self, request: RequestView, book: Book) -> tuple[Leg, ...]:
        """Return a leg for all of a request; where it cannot end here, one for what is known."""
        largest = self._books.largest
        if book.kind.entries_held >= most_entries(request) or book.kind is largest.kind:
            return (Leg(book.name),)
        return Leg(book.name, request.num_known, "when_room"), Leg(largest.name)

    def _is_kept(self, kind: Kind) -> bool:
        """Tell whether these instances' room is for decodes of smaller pools."""
        if not self.options.keeps_room or not self.options.most_moves:
            return False
        if self._is_scarce(kind, kind.below):
            return True
        if kind.seats > _AMPLE * kind.all_seats and kind.room > _AMPLE * kind.all_room:
            return False
        return any(each.with_time and self._next <= each.entries_held for each in kind.below)

    def _is_scarce(self, kind: Kind, below: Sequence[Kind]) -> bool:
        """Tell whether there is little room beside what others may want to hand on."""
        if not below:
            return False
        decodes, due = sum(each.decodes for each in below), sum(each.due for each in below)
        return kind.seats <= _SCARCE * decodes or kind.room <= due

    # Who takes whose decodes.

    def on_step(self, step: StepView, cluster: ClusterView) -> Sequence[Action]:
        """Take over decodes: those of others here, and by others this instance's."""
        if cluster.instances is not self._seen:
            self._follow(cluster)
        book = self._books.by_name.get(step.instance)
        if book is None:
            return ()
        if book.kind.is_below:
            book.note(step)
        book.renew(cluster.instances[book.name])
        self._note_open(book)
        if not self.options.most_moves or len(self._books.by_name) == 1:
            return ()
        actions: list[Action] = []
        if book.has_room:
            for other in self._worse(book):
                if not book.has_room:
                    break
                self._take(book, other, cluster, actions)
        if book.longest != 0:
            for other in self._better(book):
                if book.longest == 0:
                    break
                self._take(other, book, cluster, actions)
            if self._waits:
                self._make_room(book, cluster, actions)
        return actions

    def _gives(self, kind: Kind, to: Kind, context: float) -> bool:
        """Tell whether decodes with so many entries are better off there, while requests wait."""
        if not kind.decodes:
            return False
        ratio = to.speeds.displaced(context) / kind.speeds.displaced(context)
        if kind not in to.below:
            return ratio < _LESS
        return ratio < _LITTLE_MORE or self._is_scarce(to, [kind])

    def _worse(self, book: Book) -> list[Book]:
        """The instances whose decodes this one takes, the worst first."""
        if not self._waits:
            most, every = _SHORTER * book.step_s, self._books.by_name.values()
            givers = [each for each in every if each.longest != 0 and each.step_s > most]
            return sorted(givers, key=lambda each: -each.step_s) if givers else givers
        if not book.kind.inlets:
            return []
        context = self._books.mean_context
        kinds = [kind for kind in book.kind.inlets if self._gives(kind, book.kind, context)]
        if len(kinds) > 1:
            kinds.sort(key=lambda kind: kind.speeds.displaced(context), reverse=True)
        return [each for kind in kinds for each in kind.books if each.longest != 0]

    def _better(self, book: Book) -> list[Book]:
        """The instances that take this one's decodes, the best first."""
        if not self._waits:
            own, every = book.step_s, self._books.by_name.values()
            takers = [each for each in every if each.has_room and own > _SHORTER * each.step_s]
            return sorted(takers, key=lambda each: each.step_s) if takers else takers
        if not book.kind.outlets:
            return []
        context = self._books.mean_context
        kinds = [kind for kind in book.kind.outlets if self._gives(book.kind, kind, context)]
        if len(kinds) > 1:
            kinds.sort(key=lambda kind: kind.speeds.displaced(context))
        return [each for kind in kinds for each in kind.books if each.has_room]

    def _make_room(self, book: Book, cluster: ClusterView, actions: list[Action]) -> None:
        """Hand decodes on to a larger pool, so that the next prompt may begin here."""
        if self._next > book.kind.entries_held:
            return
        lacking = book.pages_for(self._next) - book.room
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
            self._take(most, book, cluster, actions, lacking)

    def _take(
        self,
        to: Book,
        book: Book,
        cluster: ClusterView,
        actions: list[Action],
        wanted: float = float("inf"),
    ) -> None:
        """Have one instance take the longest decodes of another, while it has room.

        Args:
            wanted: pages that are to come free.
        """
        if book.longest and to.room < to.pages_for(book.longest + 1):
            return  # As it was when it was last looked for.
        before = self._taken
        book.longest = self._take_longest(to, book, cluster, actions, wanted)
        if self._taken > before:
            to.conclude()
            book.conclude()

    def _take_longest(
        self, to: Book, book: Book, cluster: ClusterView, actions: list[Action], wanted: float
    ) -> int | None:
        """Take decodes, and return the KV entries of the longest one that is left."""
        view = cluster.instances[book.name]
        for count in _AT_ONCE:
            longest = view.longest_decodes(count, self._fixed)
            for name, entries in longest:
                pages = to.pages_for(entries + 1)
                if wanted <= 0 or to.seats < 1 or to.room < pages:
                    return entries
                self._moves[name], self._bound_for[name] = self._moves.get(name, 0) + 1, to
                self._fixed.add(name)
                to.coming[name] = pages
                to.take(pages)
                book.give(entries)
                wanted -= pages
                actions.append(Reassign(name, (Leg(to.name),), "when_room"))
                self._taken += 1
            if len(longest) < count:
                return 0
        return None

    def on_leg_end(self, request: RequestView, leg: Leg, cluster: ClusterView) -> None:
        """Count a request that was taken where it goes: it is on its way."""
        name = request.id
        book = self._arrive(name)
        if book and name in self._fixed and book.name in self._books.by_name:
            self._home[name] = book.name
            self._books.by_name[book.name].stay += 1
        self._stale[leg.instance] = None

    def on_finish(self, request: RequestView, cluster: ClusterView) -> None:
        """Forget a request."""
        self._return(request.id)
        self._moves.pop(request.id, None)
        self._fixed.discard(request.id)

    def _arrive(self, name: str) -> Book | None:
        """Return whom a request was bound for, which it no longer is."""
        book = self._bound_for.pop(name, None)
        if book:
            book.coming.pop(name, None)
            if self._moves[name] < self.options.most_moves:
                self._fixed.discard(name)
        return book

    def _return(self, name: str) -> None:
        """A request is nowhere any more."""
        self._arrive(name)
        home = self._home.pop(name, None)
        if home in self._books.by_name:
            self._books.by_name[home].stay -= 1

    def report(self) -> Mapping[str, object]:
        """Count the decodes that were taken over."""
        return {"decodes_taken": self._taken}
