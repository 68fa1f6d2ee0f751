"""Takeover: whole prompts on whoever is free; decodes are taken over by whoever is best at them.

No prompt is cut ahead of time and no length is predicted. While requests wait, an instance takes
the decodes of those on which a decode displaces more of the prompts that wait; while none does, of
those that decode slower. ``docs/results/takeover.md`` says what comes of it, and what each part is
worth.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from pydantic import Field

from jaxinfer.options.validation import Options
from jaxinfer.serving.system import (
    Action,
    Assignment,
    ClusterView,
    Leg,
    Reassign,
    RequestView,
    StepView,
    System,
)
from jaxinfer.systems.instances import most_entries
from jaxinfer.systems.takeover_books import Book, Books, Kind, rest_of

# A pool of less than this share of the largest one's does not hold what others' could.
_SMALL = 0.25
# By how much another instance has to be better: in what a decode displaces, or in seconds.
_BETTER, _FASTER = 1.05, 1.3
_NEAR = 1.1
_SCARCE = 0.25
# Steps whose tokens may wait in an instance's queue: one runs, one is launched ahead.
_STEPS_AHEAD = 2


class TakeoverOptions(Options):
    """Options of ``Takeover``.

    Attributes:
        spared: Share of a pool that takes leave free.
        most_moves: Takes of one request, at most.
        takes_decodes: Whether decodes are taken at all.
        keeps_room: Whether prompts begin elsewhere while an instance's room is for decodes.
    """

    spared: float = Field(default=0.01, ge=0, lt=1)
    most_moves: int = Field(default=2, ge=0)
    takes_decodes: bool = True
    keeps_room: bool = True


class Takeover(System):
    """Requests begin on whoever is free, and are taken over while they decode."""

    Options = TakeoverOptions
    options: TakeoverOptions
    needs_fits = True
    needs_decode_rows = False  # Views count decodes; a simulation may advance them together.

    def __init__(self, options: TakeoverOptions | None = None) -> None:
        super().__init__(options)
        self._books = Books(self.options.spared)
        self._waits = False
        self._next = 0
        # Takes of each request that is there, and who is to have it.
        self._moves: dict[str, int] = {}
        self._bound_for: dict[str, Book] = {}
        self._counts = {"decodes_taken": 0}

    def _of(self, cluster: ClusterView) -> Mapping[str, Book]:
        """The books, of instances that are there."""
        if cluster.instances.keys() != self._books.by_name.keys():
            self._books.follow(cluster.instances)
        return self._books.by_name

    # Where requests begin.

    def route(self, waiting: Collection[RequestView], cluster: ClusterView) -> Sequence[Assignment]:
        """Requests in their order, each where it is computed first, while there is room."""
        books = self._of(cluster)
        for book in books.values():
            if book.idle:
                book.renew(cluster.instances[book.name])
        assignments: list[Assignment] = []
        left = False
        for request in waiting:
            book = self._place(request, books)
            if book is None:
                left = True
                self._next = request.num_known
                break
            rest = rest_of(request)
            book.take(0 if request.held_by == book.name else book.pages_for(request.num_known))
            book.backlog += rest
            assignments.append(Assignment(request.id, self._legs(request, book, books)))
        self._waits = left
        return assignments

    def _legs(
        self, request: RequestView, book: Book, books: Mapping[str, Book]
    ) -> tuple[Leg, ...]:
        """All of a request, or where that does not fit its prompt."""
        if book.kind.entries_held >= most_entries(request):
            return (Leg(book.name),)
        largest = max(books.values(), key=lambda each: each.kind.entries_held)
        return Leg(book.name, request.prompt_len, "when_room"), Leg(largest.name)

    def _place(self, request: RequestView, books: Mapping[str, Book]) -> Book | None:
        """Who is to compute a request; None if it has to wait."""
        if request.held_by in books:
            return books[request.held_by]
        most, rest = most_entries(request), rest_of(request)
        best, least = None, float("inf")
        holds = False
        for book in books.values():
            if book.kind.entries_held < most:
                if book.kind.entries_held < request.prompt_len or request.num_known > request.prompt_len:
                    continue
            else:
                holds = True
            if not self._takes(book, request.num_known):
                continue
            seconds = (book.backlog + rest) * book.token_s()
            if seconds < least:
                best, least = book, seconds
        if not holds:  # The loop says so.
            return max(books.values(), key=lambda book: book.kind.entries_held)
        return best

    def _takes(self, book: Book, entries: int) -> bool:
        """Tell whether a prompt may begin there."""
        if book.idle:
            return True
        if book.seats < 1 or book.backlog >= _STEPS_AHEAD * book.budget:
            return False
        if book.room - book.spare < book.pages_for(entries):
            return False
        return not (self.options.keeps_room and self._waits and self._is_kept(book))

    def _is_kept(self, book: Book) -> bool:
        """Tell whether an instance's room is for decodes that others run."""
        held = _SMALL * book.kind.entries_held
        below = [kind for kind in self._books.kinds if kind.entries_held < held]
        if any(kind.with_time for kind in below):
            return True
        return bool(below) and self._is_scarce(book.kind, below)

    def _is_scarce(self, kind: Kind, below: list[Kind]) -> bool:
        decodes = sum(k.decodes for k in below)
        entries = sum(b.due for k in below for b in k.books)
        free = sum(b.seats for b in kind.books)
        room = sum((b.room - b.spare) * b.page_size for b in kind.books)
        return free <= _SCARCE * decodes or room <= entries

    # Who takes whose decodes.

    def _below(self, kind: Kind) -> list[Kind]:
        """Kinds of instances whose decodes are better off on this one, the worst first."""
        kinds = self._books.kinds
        if len(kinds) == 1:
            return []
        context = self._books.mean_context()
        largest = max(each.entries_held for each in kinds)

        own = kind.speeds.displaced(context)
        small = kind.entries_held < _SMALL * largest
        found = []
        for number, each in enumerate(kinds):
            its_small = each.entries_held < _SMALL * largest
            displaced = each.speeds.displaced(context)
            if its_small and not small:
                if own < _NEAR * displaced or self._is_scarce(kind, [each]):
                    found.append((1e6 * displaced, number, each))
            elif its_small == small and own * _BETTER < displaced:
                found.append((displaced, number, each))
        return [each for _, _, each in sorted(found, reverse=True)]

    def on_step(self, step: StepView, cluster: ClusterView) -> Sequence[Action]:
        """Take over decodes: those of others, or by others those of this instance."""
        book = self._of(cluster).get(step.instance)
        if book is None:
            return ()
        book.note(step)
        book.renew(cluster.instances[book.name])
        if not self.options.takes_decodes or len(self._books.by_name) == 1:
            return ()
        actions: list[Action] = []
        if self._has_room(book):
            for other in self._worse(book):
                if not self._has_room(book):
                    break
                actions += self._take(book, other, cluster)
        if book.decodes:
            for other in self._better(book):
                actions += self._take(other, book, cluster)
        if self._waits and book.decodes:
            actions += self._make_room(book, cluster)
        return actions

    def _make_room(self, book: Book, cluster: ClusterView) -> list[Action]:
        """Have decodes go to where there is more room, so that the next prompt may begin here."""
        lacking = book.pages_for(self._next) - (book.room - book.spare)
        if lacking <= 0:
            return []
        held = book.kind.entries_held / _SMALL
        others = [
            each
            for each in self._books.by_name.values()
            if each.kind.entries_held > held and self._has_room(each)
        ]
        if not others:
            return []
        to = max(others, key=lambda each: each.room)
        return self._take(to, book, cluster, lacking)

    def _has_room(self, book: Book) -> bool:
        return book.seats > 0 and book.room > book.spare

    def _worse(self, book: Book) -> Iterable[Book]:
        """Whose decodes this instance takes, the worst first."""
        if self._waits:
            for kind in self._below(book.kind):
                yield from sorted(
                    (each for each in kind.books if each.decodes), key=lambda each: -each.decodes
                )
        else:
            own = book.step_s()
            slower = [each for each in self._books.by_name.values() if each.decodes]
            for each in sorted(slower, key=lambda each: -each.step_s()):
                if each is not book and each.step_s() > _FASTER * own:
                    yield each

    def _better(self, book: Book) -> Iterable[Book]:
        """Who takes this instance's decodes, the best first."""
        if self._waits:
            for kind in self._books.kinds:
                if kind is not book.kind and book.kind in self._below(kind):
                    yield from (each for each in kind.books if self._has_room(each))
        else:
            own = book.step_s()
            faster = [each for each in self._books.by_name.values() if self._has_room(each)]
            for each in sorted(faster, key=lambda each: each.step_s()):
                if each is not book and own > _FASTER * each.step_s():
                    yield each

    def _take(
        self, to: Book, book: Book, cluster: ClusterView, enough: int | None = None
    ) -> list[Action]:
        """Have one instance take the longest decodes of another, as many as it has room for."""
        actions: list[Action] = []
        view = cluster.instances[book.name]
        most = min(to.seats, book.decodes)
        for name, entries in view.longest_decodes(most) if most > 0 else ():
            pages = to.pages_for(entries + 1)
            if to.seats < 1 or to.room - pages < to.spare:
                break
            if enough is not None:
                if enough <= 0:
                    break
                enough -= pages
            if self._moves.get(name, 0) >= self.options.most_moves or name in self._bound_for:
                continue
            self._moves[name] = self._moves.get(name, 0) + 1
            self._bound_for[name] = to
            to.coming[name] = pages
            to.take(pages)
            book.decodes -= 1
            book.kind.decodes -= 1
            book.entries -= entries
            book.kind.entries -= entries
            actions.append(Reassign(name, (Leg(to.name),), "when_room"))
        self._counts["decodes_taken"] += len(actions)
        return actions

    def on_leg_end(self, request: RequestView, leg: Leg, cluster: ClusterView) -> None:
        """A decode is on its way: it counts where it goes."""
        self._arrived(request.id)
        book = self._books.by_name.get(leg.instance)
        if book and leg.instance in cluster.instances:
            book.renew(cluster.instances[leg.instance])  # It may have no step to come.

    def on_finish(self, request: RequestView, cluster: ClusterView) -> None:
        """Forget a request."""
        self._arrived(request.id)
        self._moves.pop(request.id, None)

    def _arrived(self, name: str) -> None:
        book = self._bound_for.pop(name, None)
        if book:
            book.coming.pop(name, None)

    def report(self) -> Mapping[str, object]:
        """How many decodes were taken over."""
        return dict(self._counts)
