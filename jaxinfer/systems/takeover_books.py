"""Books of ``Takeover``: each instance as it last was, and those alike together.

An entry is renewed at its instance's own events alone, and changed by what the system decides
between them: no decision looks at all requests of all instances.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import exp

from jaxinfer.serving.step_fit import StepFit
from jaxinfer.serving.system import InstanceView, RequestView, StepView
from jaxinfer.systems.instances import capacity

# Seconds over which it is told how much of its time an instance computes prompts.
_MEMORY_S = 20.0
# Steps for whose growth takes leave room.
_GROWTH = 32
# An instance that computes prompts for a smaller share of its time could compute more.
_BUSY = 0.9


@dataclass(frozen=True)
class Speeds:
    """Seconds of an instance's work, by its fits.

    Attributes:
        token_s: of a prompt's token in a full step.
        sequence_s, entry_s: of a decode, and of each KV entry that it sees, beside others.
        step_s: of a step of decodes alone, whatever they are.
        full_s: of a step with as many tokens as there may be, without its decodes' entries;
            ``full_entry_s``: of each of these.
    """

    token_s: float
    sequence_s: float
    entry_s: float
    step_s: float
    full_s: float
    full_entry_s: float

    @classmethod
    def of(cls, fit: StepFit) -> "Speeds":
        """Speeds by fits; a decode's by those of mixed steps, where it has none of its own."""
        mixed, decode = fit.mixed, fit.decode
        entry_s, full_s = max(mixed.per_decode_context, 0.0), max(mixed.constant, 1e-9)
        own = (decode.per_sequence, decode.per_context, decode.constant) if decode else ()
        rows = [max(each, 0.0) for each in own] or [0.0, entry_s, full_s]
        return cls(max(fit.prefill.per_token, 1e-12), *rows, full_s, entry_s)

    def displaced(self, context: float) -> float:
        """Prompt tokens that could be computed in place of a decode with so many KV entries."""
        return 1 + (self.sequence_s + self.entry_s * context) / self.token_s


@dataclass
class Kind:
    """Instances alike, and what they run together.

    Attributes:
        with_time: how many of them could compute more prompts.
    """

    speeds: Speeds
    entries_held: int
    books: list["Book"] = field(default_factory=list)
    decodes: int = 0
    entries: int = 0
    with_time: int = 0


@dataclass(eq=False)
class Book:
    """One instance as it last was.

    Attributes:
        budget: tokens of a step.
        pages: of its pool; ``spare``: those that takes leave free.
        decodes, entries: that run there, and their KV entries.
        backlog: prompt tokens to be computed; ``due``: KV entries of all, once these are.
        seats, room: seats and pages that nobody has or is promised.
        idle: nothing was there.
        coming: by id, pages of requests that are to come and are not there yet.
        busy: share of its time in which it computed prompts.
    """

    name: str
    kind: Kind
    budget: int
    page_size: int
    pages: int
    watermark: int
    spare: int = 0
    decodes: int = 0
    entries: int = 0
    backlog: int = 0
    due: int = 0
    seats: int = 0
    room: int = 0
    idle: bool = True
    coming: dict[str, int] = field(default_factory=dict)
    busy: float = 1.0
    seen: float = 0.0

    def pages_for(self, entries: int) -> int:
        """Pages of so many KV entries."""
        return -(-entries // self.page_size)

    def renew(self, view: InstanceView) -> None:
        """Write down how the instance is now."""
        kind, coming = self.kind, self.coming
        decodes, entries = view.num_decodes, view.decode_entries
        kind.decodes += decodes - self.decodes
        kind.entries += entries - self.entries
        self.decodes, self.entries = decodes, entries
        self.backlog = view.prompt_tokens_left
        self.due = view.kv_entries + self.backlog
        there = view.num_requests
        self.idle = not there and not coming
        self.seats = view.max_num_seqs - there - len(coming)
        self.room = view.num_free_pages - sum(coming.values())
        self.spare = self.watermark + _GROWTH * decodes // self.page_size
        for request in view.waiting:
            self.room -= self.pages_for(request.num_known)

    def note(self, step: StepView) -> None:
        """A step has ended: with a prompt's chunk, or without."""
        chunk = any(row.start < row.request.prompt_len for row in step.rows)
        before = self.busy < _BUSY
        since = max(self.seen, 0.0)
        idle, ran = max(step.start - since, 0.0), step.end - max(step.start, since)
        kept = exp(-max(ran, 0.0) / _MEMORY_S)
        self.busy = self.busy * exp(-idle / _MEMORY_S) * kept + chunk * (1 - kept)
        self.seen = step.end
        self.kind.with_time += (self.busy < _BUSY) - before

    def take(self, pages: int) -> None:
        """Promise a seat and pages."""
        self.seats -= 1
        self.room -= pages
        self.idle = False

    def token_s(self) -> float:
        """Seconds of a prompt's token, among the decodes that run now."""
        speeds = self.kind.speeds
        left = max(self.budget - self.decodes, 1)
        seconds = speeds.full_s + speeds.full_entry_s * self.entries
        return max(seconds / left, speeds.token_s)

    def step_s(self) -> float:
        """Seconds of a step as it is now: a full one while prompts are to be computed."""
        speeds = self.kind.speeds
        if self.backlog:
            return speeds.full_s + speeds.full_entry_s * self.entries
        rows = speeds.sequence_s * self.decodes + speeds.entry_s * self.entries
        return speeds.step_s + rows


class Books:
    """The books of all instances that are there.

    Attributes:
        by_name: in their order.
        kinds: those of them that are alike.
    """

    def __init__(self, spared: float) -> None:
        self._spared = spared
        self.by_name: dict[str, Book] = {}
        self.kinds: list[Kind] = []

    def follow(self, instances: Mapping[str, InstanceView]) -> None:
        """Open new books where an instance was lost, or is back."""
        old, self.by_name, self.kinds = self.by_name, {}, []
        alike: dict[tuple[object, ...], Kind] = {}
        for name, view in instances.items():
            assert view.fit
            held = capacity(view)
            key = view.fit, held, view.max_num_batched_tokens, view.max_num_seqs
            kind = alike.setdefault(key, Kind(Speeds.of(view.fit), held))
            pages = view.num_pages
            book = Book(
                name, kind, view.max_num_batched_tokens, view.page_size, pages,
                int(self._spared * pages),
            )  # fmt: skip
            if name in old:
                book.coming, book.seen = old[name].coming, old[name].seen
            kind.books.append(book)
            self.by_name[name] = book
            book.renew(view)
        self.kinds = list(alike.values())

    def mean_context(self) -> float:
        """KV entries of a decode in the mean."""
        decodes = sum(kind.decodes for kind in self.kinds)
        return sum(kind.entries for kind in self.kinds) / decodes if decodes else 0.0


def emptiest(books: Iterable[Book]) -> Book | None:
    """The one with the most room."""
    return max(books, key=lambda book: book.room / book.pages, default=None)


def rest_of(request: RequestView) -> int:
    """Tokens that a request has to compute before it samples again."""
    return request.num_known - request.computed


Below = Callable[[Kind], list[Kind]]
