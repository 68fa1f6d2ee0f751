"""Takeover's prompts while few requests wait: spread over steps, and taken over while computed."""

from collections.abc import Iterable, Iterator, Sequence

from jaxinfer.papers.takeover.accounts import Account
from jaxinfer.papers.takeover.slo import Slo
from jaxinfer.serving.views import ClusterView, StepView
from jaxinfer.systems.instances import most_entries

# Number of steps over which prompts are spread among decodes.
_STEPS = 4
# Share of a target that estimates may use up, because they leave out prompts' attention.
_CLOSE = 0.9


def limit(
    book: Account,
    backlog: int,
    slo: Slo,
    now: float | None = None,
    behind: Sequence[tuple[float, int]] = (),
) -> int:
    """Return how many prompt tokens a step may have beside its decodes; 0 for no limit.

    Prompt tokens that fit into the time of reading the weights cost nothing. Beyond these, prompts
    are spread evenly over a few steps. The limit does not fall until all of them are computed,
    since the last ones would otherwise continue for long. With a target for TBT, a step has as many
    tokens as meet the target. With a target for TTFT, it has as many as that target needs, if these
    are more.

    Args:
        now: time in seconds; None if prompts are not there yet, so that no TTFT is at risk.
        behind: for each request that has to wait, the oldest first: its arrival, and the prompt
            tokens that must be computed here in addition to the backlog until its own prompt is
            done.
    """
    if not (backlog and book.decodes):
        return 0
    free = _free_tokens(book) - book.decodes
    if slo.tbt is None:
        tokens = max(free, -(-backlog // _STEPS), book.limit)
    else:
        step_s = book.step_s + book.attention_s
        tokens = max(free + int((_CLOSE * slo.tbt - step_s) / _token_s(book)), 1)
    if slo.ttft is not None and now is not None:
        left_s, most, sum_, by_tbt = _CLOSE * slo.ttft - now, book.budget, 0, tokens
        for arrival, rest in _pending(book):
            sum_ += rest
            tokens = max(tokens, min(_tokens_within(book, sum_, arrival + left_s), most))
        for arrival, rest in behind:
            needed = _tokens_within(book, backlog + rest, arrival + left_s)
            tokens = max(tokens, min(needed, most))
        book.for_ttft = tokens > by_tbt
    return tokens if tokens < book.budget - book.decodes else 0


def _pending(book: Account) -> Iterator[tuple[float, int]]:
    """Yield arrival and remaining tokens of prompts in the order in which they are computed."""
    yield from ((arrival, rest) for arrival, rest, *_ in book.under_way.values())
    for request in book.view.waiting:
        yield request.arrival, request.num_known - request.computed


def _tokens_within(book: Account, tokens: int, seconds: float) -> int:
    """Return the prompt tokens per step that compute ``tokens`` in time, or the whole budget."""
    free, token_s = _free_tokens(book) - book.decodes, _token_s(book)
    if free > 0 and tokens * book.step_s <= free * seconds:
        return -int(-tokens * book.step_s // seconds)
    # tokens / chunk * (step_s + (chunk - free) * token_s) = seconds
    spare_s = seconds - tokens * token_s
    if spare_s <= 0:
        return book.budget
    return -int(-tokens * max(book.step_s - free * token_s, 0.0) // spare_s)


def cost(book: Account, tokens: int, slo: Slo) -> float:
    """Return the seconds until ``tokens`` of one more prompt are computed, weighted by decodes.

    The larger the share of decodes in steps, the more decodes a prompt delays.
    """
    return seconds(book, tokens, slo) * (1 + _share_of_decodes(book))


def seconds(book: Account, tokens: int, slo: Slo) -> float:
    """Return the seconds until ``tokens`` of one more prompt are computed, spread over steps."""
    backlog = book.backlog + tokens
    chunk = limit(book, backlog, slo)
    if not chunk:
        return book.seconds(tokens)
    beyond = max(chunk + book.decodes - _free_tokens(book), 0)
    return backlog / chunk * (book.step_s + beyond * _token_s(book))


def _share_of_decodes(book: Account) -> float:
    """Return the seconds that decodes add to a step, divided by those of a full step
    without them.
    """
    speeds = book.kind.speeds
    return (book.step_s - speeds.step_s) / max(speeds.full_s, speeds.step_s)


def _token_s(book: Account) -> float:
    """Return the seconds of a token in a full step."""
    return book.kind.speeds.full_s / book.budget


def _free_tokens(book: Account) -> int:
    """Return the number of tokens that are computed while the weights are read."""
    speeds = book.kind.speeds
    return int(book.budget * speeds.step_s / speeds.full_s)


def note(book: Account, step: StepView) -> None:
    """Record how many tokens of partly computed prompts are left after a step."""
    under_way = book.under_way
    for row in step.rows:
        request = row.request
        rest = request.prompt_len - row.start - row.count
        if rest > 0 and request.legs and request.legs[0].instance == book.name:
            left = request.arrival, rest, request.num_known, most_entries(request)
            under_way[request.id] = left
        else:
            under_way.pop(request.id, None)


def pays(here: Account, there: Account, cluster: ClusterView, slo: Slo) -> float:
    """Return by how many seconds the oldest partly computed prompt would be done sooner elsewhere.

    It is 0 if the prompt should stay: until its computed part has taken as long here as the rest
    will take there, times the share of decodes in steps there. The two instances then compute parts
    of a prompt in similar times, as in Cronus (section 4.2), and the faster one has time for
    decodes. With a target for TTFT, the prompt stays while all prompts here are in time, and moves
    at once if it could soon be late there, too.
    """
    name, (arrival, rest, known, most) = next(iter(here.under_way.items()))
    if there.kind.entries_held < most or not there.has_room or there.backlog >= there.most_backlog:
        return 0.0
    if there.room < there.pages_for(known) or any(name == each.id for each in here.view.waiting):
        return 0.0
    way_s = here.step_s + (known - rest) * cluster.kv_token_s(here.name, there.name)
    # ``seconds`` counts the backlog.
    rest_s = seconds(there, rest - there.backlog, slo)
    there_s = max(way_s + rest_s, seconds(there, rest, slo))
    here_s, spent_s = (seconds(here, each - here.backlog, slo) for each in (rest, known - rest))
    is_late = False
    if slo.ttft is not None:
        left_s = _CLOSE * slo.ttft - cluster.now
        if _are_in_time(here, left_s, slo):
            return 0.0
        is_late = there_s + here.step_s > arrival + left_s
    if spent_s < _share_of_decodes(there) * rest_s and not is_late:
        return 0.0
    return here_s - there_s


def _are_in_time(book: Account, left_s: float, slo: Slo) -> bool:
    """Tell whether all prompts of an instance will be computed in time."""
    tokens = 0
    for arrival, rest in _pending(book):
        tokens += rest
        if seconds(book, tokens - book.backlog, slo) > arrival + left_s:
            return False
    return True


def best_take(
    book: Account,
    holders: Iterable[Account],
    open_to: Iterable[Account],
    cluster: ClusterView,
    slo: Slo,
) -> tuple[Account, Account] | None:
    """Return the instance that should hand over its oldest prompt, and the one that should get it.

    Running instances look at others after each of their own steps; idle ones cannot.

    Args:
        holders: instances that may have partly computed prompts.
        open_to: instances that could begin a prompt.
    """
    token_s = book.kind.speeds.token_s
    pairs = [(e, book) for e in holders if e.under_way and e.kind.speeds.token_s > token_s]
    if book.under_way:
        pairs += [(book, e) for e in open_to if e.idle and e.kind.speeds.token_s < token_s]
    best, most = None, 0.0
    for here, there in pairs:
        if (sooner := pays(here, there, cluster, slo)) > most:
            best, most = (here, there), sooner
    return best
