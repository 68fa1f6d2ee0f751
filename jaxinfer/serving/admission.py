"""Rules that order and admit the waiting requests of one instance.

A request is admitted with pages for the tokens known so far; no pages are kept for its growth. The
rules differ in how much of that growth they wait for. Rules that depend on the length of an answer
use the predicted length, or the limit (``max_tokens``) if there is no prediction.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from pydantic import Field

from jaxinfer.options.validation import Options
from jaxinfer.serving.instance import Instance
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.views import Leg

Bound = Literal["low", "high"]


def first_come_first_served(waiting: Sequence[RequestState]) -> RequestState:
    """Choose a preempted request if there is one, otherwise the one that came first."""
    return waiting[0]


def shortest_prompt_first(waiting: Sequence[RequestState]) -> RequestState:
    """Choose the shortest prompt; among equal ones, the one nearest to the head of the queue."""
    return min(waiting, key=lambda request: request.prompt_len)


def longest_prompt_first(waiting: Sequence[RequestState]) -> RequestState:
    """Choose the longest prompt; among equal ones, the one nearest to the head of the queue."""
    return max(waiting, key=lambda request: request.prompt_len)


def latest(candidates: Sequence[RequestState]) -> RequestState:
    """Preempt the request admitted last, so that the oldest one always finishes."""
    return candidates[-1]


def greedy(instance: Instance, request: RequestState, leg: Leg) -> bool:
    """Admit if the tokens known so far fit and the watermark stays free.

    Without a watermark, growing requests would keep evicting requests that were just admitted. An
    idle instance ignores the watermark.
    """
    free = instance.kv.num_free - instance.pages_to_take(request, leg)
    return free >= (0 if instance.is_idle else instance.watermark_pages)


def once_per_prefix(instance: Instance, request: RequestState, leg: Leg) -> bool:
    """Admit as ``greedy`` does, but not while another request computes a page that it could reuse.

    The request waits until the prefix cache has the page. Requests with a common prefix that arrive
    together thus compute it only once.
    """
    return greedy(instance, request, leg) and not _is_being_computed(instance, request, leg)


def _is_being_computed(instance: Instance, request: RequestState, leg: Leg) -> bool:
    """Return whether a running request computes the first page that the cache lacks."""
    if not (instance.kv.cache and request.takes_cached and request.prompt_token_ids):
        return False
    pages = len(instance.cached_prefix(request, leg)) + 1
    end = pages * instance.page_size
    if request.computed or end >= request.known_until(leg):
        return False
    digest = request.page_digests(instance.page_size, pages)[-1]
    return any(
        other.computed < end <= other.prompt_len
        and end <= (other.legs[0].until or end)
        and not other.paused
        and other.page_digests(instance.page_size, pages)[-1] == digest
        for other in instance.taking_part.in_prompts()
    )


def whole_request(instance: Instance, request: RequestState, leg: Leg) -> bool:
    """Admit if this request and all others fit even at their largest possible sizes.

    Sizes are limits, not predictions, so no request is ever preempted.
    """
    ends = [_end(other, other.legs[0]) for other in _admitted(instance)]
    return _fits(instance, [*ends, _end(request, leg)])


class ReserveLongestOptions(Options):
    """Options of ``ReserveLongest``.

    Attributes:
        tokens: Prompt and output tokens of the longest possible request.
    """

    tokens: int = Field(ge=2)


class ReserveLongest:
    """Reserve memory for the longest possible sequence of each request, as Orca does."""

    Options = ReserveLongestOptions

    def __init__(self, options: ReserveLongestOptions) -> None:
        self._tokens = options.tokens

    def __call__(self, instance: Instance, request: RequestState, leg: Leg) -> bool:
        """Tell whether one more request fits; an idle instance admits any request."""
        count = sum(1 for _ in _admitted(instance)) + 1
        return instance.is_idle or _fits(instance, [self._tokens] * count)


class PredictedOptions(Options):
    """Options of admissions by predicted lengths.

    Attributes:
        bound: End of the predicted range that counts.
    """

    bound: Bound = "high"


class ReserveStatic:
    """Admit if the predicted memory of all requests fits at once: TetriInfer's reserve-static.

    A request that has outgrown its prediction counts with its current size.
    """

    Options = PredictedOptions

    def __init__(self, options: PredictedOptions) -> None:
        self._bound = options.bound

    def __call__(self, instance: Instance, request: RequestState, leg: Leg) -> bool:
        """Tell whether the request's predicted pages fit together with those of all others."""
        ends = [
            max(_held(other), predicted_end(other, other.legs[0], self._bound))
            for other in _admitted(instance)
        ]
        return _fits(instance, [*ends, predicted_end(request, leg, self._bound)])


class ReserveDynamic:
    """Admit if there is room until the next request is predicted to end: TetriInfer's
    reserve-dynamic.
    """

    Options = PredictedOptions

    def __init__(self, options: PredictedOptions) -> None:
        self._bound = options.bound

    def __call__(self, instance: Instance, request: RequestState, leg: Leg) -> bool:
        """Tell whether all requests still fit when the shortest one has ended."""
        found = [(_held(other), other, other.legs[0]) for other in _admitted(instance)]
        found.append((request.known_until(leg), request, leg))
        left = [
            max(predicted_end(other, its_leg, self._bound) - held, 0)
            for held, other, its_leg in found
        ]
        steps = min(left)
        ends = (min(held + steps, _end(other, its_leg)) for held, other, its_leg in found)
        return _fits(instance, ends)


class Peak:
    """Admit if the predicted memory fits in every future step, as requests grow and end.

    This is LightLLM's rule, and Aladdin's constraint e. The rule assumes that all requests advance
    together. The pool can still overflow if prompts are cut or steps are launched ahead.
    """

    Options = PredictedOptions

    def __init__(self, options: PredictedOptions) -> None:
        self._bound = options.bound

    def __call__(self, instance: Instance, request: RequestState, leg: Leg) -> bool:
        """Tell whether the largest future sum fits; a request that is alone always does."""
        if instance.is_idle:
            return True
        size = instance.page_size
        found = [(_held(other), other, other.legs[0]) for other in _admitted(instance)]
        found.append((request.known_until(leg), request, leg))
        # A page is held from its first entry on, so up to size - 1 entries may be empty.
        entries = peak_entries(
            (held + size - 1, max(predicted_end(other, its_leg, self._bound) - held, 0))
            for held, other, its_leg in found
        )
        return entries <= instance.kv.num_pages * size


def peak_entries(requests: Iterable[tuple[int, int]]) -> int:
    """Return the peak number of KV entries, if each request gains one per step until its end.

    Args:
        requests: for each request, its current entries and those still to come. In its last
            step, a request holds both.
    """
    held = most = 0
    for count, (now, left) in enumerate(sorted(requests, key=lambda pair: -pair[1]), 1):
        # When this request ends, all longer ones are still there, and have grown by as much.
        held += now
        most = max(most, held + count * left)
    return most


def predicted_end(request: RequestState, leg: Leg, bound: Bound) -> int:
    """Return the KV entries at the end of the leg, by the predicted length of the answer."""
    if request.predicted is None:
        return _end(request, leg)
    output = request.predicted[bound == "high"]
    # The last token needs no KV entry.
    end = request.prompt_len + max(min(output, request.max_tokens), 1) - 1
    return end if leg.until is None else min(end, leg.until)


def _end(request: RequestState, leg: Leg) -> int:
    """Return the largest possible number of KV entries at the end of the leg."""
    return request.peak_tokens if leg.until is None else min(request.peak_tokens, leg.until)


def _held(request: RequestState) -> int:
    """Return the KV entries that a request has, or will have before it samples again."""
    return request.known_until(request.legs[0])


def _admitted(instance: Instance) -> Iterator[RequestState]:
    yield from instance.running.values()
    yield from instance.importing.values()


def _fits(instance: Instance, entries: Iterable[int]) -> bool:
    """Tell whether requests with these numbers of KV entries fit into the pool."""
    kv = instance.kv
    return sum(kv.pages_for(count) for count in entries) <= kv.num_pages
