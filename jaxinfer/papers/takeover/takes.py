"""Moves of ``Takeover``: which instances take over which requests, and how often."""

from collections.abc import Collection
from heapq import heapify, heappop, heappush
from math import inf

from jaxinfer.papers.takeover.accounts import Account, Accounts
from jaxinfer.serving.system import Action, Reassign

# Largest numbers of decodes that an instance examines first, and takes in one step.
_AT_ONCE = 2, 30


class Takes:
    """Takes over decodes and prompts, and tracks the instances that requests are bound for.

    Args:
        most_moves: largest number of takeovers of one request.

    Attributes:
        most_moves: largest number of takeovers of one request.
        moves: number of takeovers of each request.
        bound_for: instance to which each request is moving, in the order of the takeovers.
        fixed: places of requests that must not be taken over, because they are bound for an
            instance or were taken over too often.
        stale: instances that handed a request over since their last step, and may have no further
            step.
        decodes: number of decodes taken over.
        prompts: number of prompts taken over.
    """

    def __init__(self, books: Accounts, most_moves: int) -> None:
        self._books, self.most_moves = books, most_moves
        self.moves: dict[str, int] = {}
        self.bound_for: dict[str, Account] = {}
        self.fixed: dict[str, Account] = {}
        self.stale: dict[str, None] = {}
        self.decodes = self.prompts = 0

    def take_prompt(self, here: Account, there: Account, actions: list[Action]) -> None:
        """Let an instance take over another one's oldest partly computed prompt."""
        name, (_, rest, known, _) = next(iter(here.under_way.items()))
        del here.under_way[name]
        if name in self.fixed:
            return
        pages = there.pages_for(known)
        self._bind(name, here, there, pages, actions)
        there.take(pages, rest)
        there.to_compute[name] = rest
        here.backlog -= rest
        here.conclude()
        there.conclude()
        self.prompts += 1

    def longest_of(self, books: Collection[Account], to: Account, actions: list[Action]) -> None:
        """Let an instance take over the longest decodes of several others, while it has room."""
        left = [(-inf if each.longest is None else -each.longest, each.number) for each in books]
        by_number = {each.number: each for each in books}
        heapify(left)
        while left and to.has_room:
            book = by_number[heappop(left)[1]]
            # If it is the only one, it gives all that it may; otherwise, one is examined or taken.
            wanted = inf if not left else 0 if book.longest is None else 1
            before = self.decodes
            self.take(to, book, actions, wanted)
            if book.longest and (wanted == 0 or self.decodes > before):
                heappush(left, (-book.longest, book.number))

    def take(
        self,
        to: Account,
        book: Account,
        actions: list[Action],
        wanted: float = inf,
    ) -> None:
        """Let an instance take over the longest decodes of another, while it has room.

        Args:
            wanted: number of pages to free.
        """
        if book.longest and to.room < to.pages_for(book.longest + 1):
            return  # The same as when it was last searched for.
        before = self.decodes
        book.look(self._take_longest(to, book, actions, wanted))
        if self.decodes > before:
            to.conclude()
            book.conclude()

    def _take_longest(
        self, to: Account, book: Account, actions: list[Action], wanted: float
    ) -> int | None:
        """Take over decodes, and return the KV entries of the longest one left."""
        kind, size = book.kind, to.page_size
        for count in _AT_ONCE:
            longest = book.view.longest_decodes(count, self.fixed)
            for name, entries in longest:
                pages = -(-(entries + 1) // size)
                if wanted <= 0 or to.seats < 1 or to.room < pages:
                    return entries
                self._bind(name, book, to, pages, actions)
                to.take(pages)
                book.decodes, kind.decodes = book.decodes - 1, kind.decodes - 1
                book.entries, kind.entries = book.entries - entries, kind.entries - entries
                wanted -= pages
                self.decodes += 1
            if len(longest) < count:
                return 0
        return None

    def _bind(
        self, name: str, book: Account, to: Account, pages: int, actions: list[Action]
    ) -> None:
        """Move a request to another instance, and record that it will arrive there."""
        self.moves[name], self.bound_for[name] = self.moves.get(name, 0) + 1, to
        self.fixed[name] = book
        book.stay += 1
        to.coming[name] = pages
        actions.append(Reassign(name, to.legs, "when_room"))

    def take_spent(self, to: Account, book: Account, actions: list[Action]) -> None:
        """Let an instance take over decodes at their limit of takeovers, while it has room."""
        running = book.view.running
        for name in list(book.spent):
            request = running.get(name)
            if request is None or request.computed < request.prompt_len:
                continue
            pages = to.pages_for(request.computed + 1)
            if to.seats < 1 or to.room < pages:
                return
            self._release(name)
            self._bind(name, book, to, pages, actions)
            to.take(pages)
            to.conclude()
            self.decodes += 1

    def _release(self, name: str) -> None:
        if before := self.fixed.pop(name, None):
            before.stay -= 1
            before.spent.pop(name, None)

    def put(self, name: str, here: Account | None) -> None:
        """Record where a request is, or that it is nowhere."""
        self._release(name)
        if bound := self.bound_for.pop(name, None):
            del bound.coming[name]
            bound.to_compute.pop(name, None)
            if bound is not here:  # It was not taken after all.
                self.moves[name] -= 1
                there = self._books.views.get(bound.name)
                if there and not there.num_requests:  # No further step will renew its book.
                    self.stale[bound.name] = None
        if here and self.moves.get(name, 0) >= self.most_moves:
            self.fixed[name] = here
            here.spent[name] = None
            here.stay += 1
