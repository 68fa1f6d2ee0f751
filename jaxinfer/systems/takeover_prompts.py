"""Takeover's prompts while few requests wait: over several steps, and taken over under way."""

from collections.abc import Iterable

from jaxinfer.serving.system import ClusterView, StepView
from jaxinfer.systems.instances import most_entries
from jaxinfer.systems.takeover_books import Book

# Steps over which prompts are spread beside decodes.
_STEPS = 4


def limit(book: Book, backlog: int) -> int:
    """Prompt tokens of a step beside decodes, 0 for as many as there may be.

    A step takes no longer for what fits beside its decodes into the time for which it reads the
    weights. Beyond these, prompts are spread evenly over a few steps: the limit does not fall
    before all of them are computed, as the last ones would go on for long.
    """
    if not (backlog and book.decodes):
        return 0
    tokens = max(_free_tokens(book) - book.decodes, -(-backlog // _STEPS), book.limit)
    return tokens if tokens < book.budget - book.decodes else 0


def seconds(book: Book, tokens: int) -> float:
    """Seconds until so many tokens of one more prompt are computed, spread over steps."""
    backlog = book.backlog + tokens
    chunk = limit(book, backlog)
    if not chunk:
        return book.seconds(tokens)
    speeds = book.kind.speeds
    beyond = max(chunk + book.decodes - _free_tokens(book), 0)
    step_s = book.step_s + beyond * speeds.full_s / book.budget
    return backlog / chunk * step_s


def _free_tokens(book: Book) -> int:
    """Tokens that are computed while the weights are read."""
    speeds = book.kind.speeds
    return int(book.budget * speeds.step_s / speeds.full_s)


def note(book: Book, step: StepView) -> None:
    """Note what is left of the prompts that are under way after a step."""
    under_way = book.under_way
    for row in step.rows:
        request = row.request
        rest = request.prompt_len - row.start - row.count
        if rest > 0 and request.legs and request.legs[0].instance == book.name:
            under_way[request.id] = rest, request.num_known, most_entries(request)
        else:
            under_way.pop(request.id, None)


def pays(here: Book, there: Book, cluster: ClusterView) -> float:
    """Seconds by which the oldest prompt under way would be computed sooner elsewhere."""
    name, (rest, known, most) = next(iter(here.under_way.items()))
    speeds, others = here.kind.speeds, there.kind.speeds
    if others.token_s >= speeds.token_s or there.kind.entries_held < most:
        return 0.0
    if not there.has_room or there.backlog >= there.most_backlog:
        return 0.0
    if there.room < there.pages_for(known) or any(name == each.id for each in here.view.waiting):
        return 0.0
    way_s = here.step_s + (known - rest) * cluster.kv_token_s(here.name, there.name)
    lead_s = max(way_s, there.seconds(0))
    # ``seconds`` counts the backlog.
    rest_s = here.seconds(rest - here.backlog) - there.seconds(rest - there.backlog)
    return rest_s - lead_s


def best_take(book: Book, books: Iterable[Book], cluster: ClusterView) -> tuple[Book, Book] | None:
    """Return who is to hand its oldest prompt on, and to whom, after a step of ``book``.

    Those that run look at others after each of their own steps, those that are idle cannot.
    """
    best, most = None, 0.0
    for other in books:
        if other is book:
            continue
        pairs = [(other, book)] if other.under_way else []
        if book.under_way and other.idle:
            pairs.append((book, other))
        for here, there in pairs:
            if (sooner := pays(here, there, cluster)) > most:
                best, most = (here, there), sooner
    return best
