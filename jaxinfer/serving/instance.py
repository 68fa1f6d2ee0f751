"""An instance: its queue, its running requests and its pages."""

import math
from collections.abc import Callable, Container, Mapping, Sequence
from operator import attrgetter
from typing import Protocol

from jaxinfer.serving.batch import Batch
from jaxinfer.serving.features.decode_group import DecodeGroup
from jaxinfer.serving.features.half_batches import ChooseHalves
from jaxinfer.serving.features.head_slices import Placement
from jaxinfer.serving.instance_options import InstanceOptions
from jaxinfer.serving.kv_shards import HeldPages, KVShards
from jaxinfer.serving.page_pool import Shard
from jaxinfer.serving.prefix_cache import CachedPage
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.running import Running
from jaxinfer.serving.step_fit import StepFit
from jaxinfer.serving.views import Counts, Leg, RequestView
from jaxinfer.serving.waiting import Waiting


class InstancePolicies(Protocol):
    """The decisions made for an instance; ``serving/policies.py`` lists the available policies."""

    @property
    def repeats_decodes(self) -> bool:
        """True if a step that decodes all requests repeats until a request arrives or ends."""

    def order(self, waiting: Sequence[RequestState]) -> RequestState:
        """Choose the waiting request to admit next."""

    def admit(self, instance: "Instance", request: RequestState, leg: Leg) -> bool:
        """Tell whether there is room for a request that starts a leg."""

    def next_batch(self, instance: "Instance") -> Batch | None:
        """Return the next step, with its rows marked as launched; None if there is none."""

    def victim(self, candidates: Sequence[RequestState]) -> RequestState:
        """Choose the request that loses its pages when another one needs a page."""


class Instance:
    """One full copy of the weights, with its queue, its running requests and its pages.

    Args:
        groups_decodes: advance decodes together. Possible if the world reads no tokens, the system
            reads no steps, and slices do not lie in several places.
        num_output: returns the number of output tokens that end a request, if the world knows it
            better than ``max_tokens``; only for decodes that are advanced together.

    Attributes:
        waiting: requests whose leg runs here and that have no pages here yet.
        importing: requests whose KV is on its way here; they have their pages.
        taking_part: requests that take part in steps.
        num_exported: number of requests whose pages wait here to be fetched by their next leg's
            instance.
        in_flight: batches launched and not yet committed.
        place: asks where to place a request's slices; used only if a stage has several shards.
        has_more: returns whether a tier has KV that a request lacks; None if there is no tier.
        fetch: called with each request that is to be admitted if ``has_more`` is true.
        make_room: asks for moves that avoid a preemption when a shard (its second argument) lacks
            pages; used only if a stage has several shards.
        halves_pay: returns whether to compute a step as two halves of its rows in turn; None if no
            step is split.
        asks_spans: whether batches state the smallest and largest number of KV entries that a
            decode sees.
        fit: fitted step times of this instance, if profiled.
        on_preempt: called with each request that will lose its pages.
        lacks_pages: the request that could not continue for lack of pages, if a stage has several
            shards.
        late: by id of a preempted request, its rows in flight whose tokens are kept.
        prompt_budget: largest number of prompt tokens of one step; None for no separate limit.
        role: a name that only the system uses.
        next_role: name that replaces ``role`` once all requests have left.
    """

    def __init__(
        self,
        name: str,
        kv: KVShards,
        options: InstanceOptions,
        policies: InstancePolicies,
        role: str = "",
        fit: StepFit | None = None,
        groups_decodes: bool = False,
        num_output: Callable[[RequestState], int] = attrgetter("max_tokens"),
    ) -> None:
        self.name = name
        self.kv = kv
        self.options = options
        self.policies = policies
        self.role = role
        self._role_since = 0.0
        self._role_s: dict[str, float] = {}
        self.fit = fit
        self.next_role: str | None = None
        self.waiting = Waiting(name, kv.page_size)
        self.importing: dict[str, RequestState] = {}
        self.num_exported = self.in_flight = self.num_preemptions = 0
        # Steps in flight when none could be formed, if the next is to wait for one of their ends.
        self._empty_at = 0
        self.late: dict[str, int] = {}
        self._note_watermark()
        self.place: Callable[[RequestState], Placement | None] = lambda request: None
        self.has_more: Callable[[RequestState], bool] | None = None
        self.fetch: Callable[[RequestState], None] = lambda request: None
        self.make_room: Callable[[RequestState, int], None] = lambda request, shard: None
        self.on_preempt: Callable[[RequestState], None] = lambda request: None
        self.halves_pay: ChooseHalves | None = None
        self.asks_spans = False
        self.lacks_pages: RequestState | None = None
        self.prompt_budget: int | None = None
        self._admitted_imports: list[RequestState] = []
        self.caches_launched = kv.cache is not None and kv.paging.cache == "launched"
        counted = len(kv.shards) == 1 and not kv.has_numbers
        self._repeats = groups_decodes and counted and policies.repeats_decodes
        page_size = kv.page_size if groups_decodes and not kv.is_spread else None
        keep = self.keep_prefix if kv.cache else None
        pool = kv.shards[0].pool if counted else None
        self.taking_part = Running(page_size, self.options.launch_ahead, num_output, keep, pool)

    def go_without(self, shards: Sequence[int]) -> None:
        """Close the shards with these numbers, and reopen all others.

        Shards that were closed before are empty when they reopen.
        """
        for number, shard in enumerate(self.kv.shards):
            if number in shards:
                shard.pool.close()
            elif shard.pool.is_closed:
                shard.pool.open()
        self._note_watermark()

    def _note_watermark(self) -> None:
        self.watermark_pages = math.ceil(self.options.watermark * self.kv.num_pages)

    @property
    def running(self) -> Mapping[str, RequestState]:
        """Requests that take part in steps, by id, in the order of their admission."""
        return self.taking_part.by_id()

    @property
    def num_running(self) -> int:
        """Number of requests that take part in steps."""
        return len(self.taking_part)

    @property
    def kv_entries(self) -> int:
        """Number of existing KV entries of the requests that take part in steps."""
        return self.taking_part.counts().kv_entries

    @property
    def prompt_tokens_left(self) -> int:
        """Number of prompt tokens that waiting, importing and running requests still have to
        compute.
        """
        return self.counts.prompt_tokens_left

    @property
    def counts(self) -> Counts:
        """Counts of the requests here, taken in one pass."""
        to_come = self.waiting.prompt_tokens_left
        for request in self.importing.values() if self.importing else ():
            # Usually, the whole prompt has been computed.
            if request.computed < request.prompt_len:
                to_come += request.prompt_tokens_left
        return self.taking_part.counts(to_come)

    def longest_decodes(self, count: int, but: Container[str] = ()) -> Sequence[tuple[str, int]]:
        """Return ids and KV entries of the ``count`` longest decodes, the longest first."""
        return self.taking_part.longest_decodes(count, but)

    @property
    def num_pages(self) -> int:
        """Pages per slice of KV heads of the largest request that the instance can hold."""
        return self.kv.num_pages

    @property
    def num_free_pages(self) -> int:
        """Pages per slice of KV heads of the largest request that fits now."""
        return self.kv.num_free

    @property
    def num_awaited_pages(self) -> int:
        """Number of pages that the waiting requests without KV here will need."""
        return self.waiting.pages

    @property
    def shards(self) -> Sequence[Shard]:
        """Shards of the instance's KV."""
        return self.kv.shards

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.kv.page_size

    @property
    def max_num_batched_tokens(self) -> int:
        """Largest number of tokens computed in one step."""
        return self.options.max_num_batched_tokens

    @property
    def max_num_seqs(self) -> int:
        """Largest number of requests that run or are being imported at a time."""
        return self.options.max_num_seqs

    @property
    def num_requests(self) -> int:
        """Number of requests waiting, importing or running here."""
        return len(self.waiting) + len(self.importing) + len(self.taking_part)

    @property
    def is_idle(self) -> bool:
        """True if nothing runs here or is being imported."""
        return not self.taking_part and not self.importing

    @property
    def draining(self) -> bool:
        """True if a new role takes effect once the last request has left."""
        return self.next_role is not None

    def take_role_when_drained(self, now: float) -> bool:
        """Change the role if a change is due and no request of the old role is left."""
        if self.next_role is None or self.num_requests or self.num_exported:
            return False
        self._role_s, self._role_since = self.role_seconds(now), now
        self.role, self.next_role = self.next_role, None
        return True

    def role_seconds(self, now: float) -> dict[str, float]:
        """Return the seconds spent in each role; ``""`` means no role."""
        before = self._role_s.get(self.role, 0.0)
        return self._role_s | {self.role: before + now - self._role_since}

    def follow(self, lost: "Instance", now: float) -> None:
        """Take over the statistics of the lost instance that this one replaces."""
        self.num_preemptions = lost.num_preemptions
        self._role_s, self._role_since = lost.role_seconds(now), now

    def next_batch(self) -> Batch | None:
        """Return the next step that the policy forms, with its rows marked as launched, or None."""
        if self.in_flight >= self.options.max_in_flight or self._empty_at == self.in_flight > 0:
            return None
        for request in list(self.waiting.pushed.values()):
            if self.keeps_pages or not self.admit(request):
                break
        batch = self.policies.next_batch(self)
        self.in_flight += batch is not None
        self._empty_at = self.in_flight if batch is None and self.options.empty_waits else 0
        return batch

    def steady_group(self) -> DecodeGroup | None:
        """Return the decodes of all steps until one ends or lacks pages, or a request arrives."""
        if self.waiting or self.in_flight < self.options.max_in_flight or not self._repeats:
            return None
        return self.taking_part.steady_group()

    @property
    def admissible(self) -> Sequence[RequestState]:
        """Requests in the queue that may be admitted: all whose late tokens are here."""
        late = self.late
        return [each for each in self.waiting if each.id not in late] if late else self.waiting

    def takes_late(self, request: RequestState) -> bool:
        """Note the end of a row launched before a preemption; tell whether its token is kept."""
        left = self.late.pop(request.id, 0)
        if left > 1:
            self.late[request.id] = left - 1
        return left > 0

    def remove(self, request: RequestState) -> None:
        """Remove a request from wherever it is here; the caller must free its pages."""
        self.late.pop(request.id, None)
        if request in self.taking_part:
            self.taking_part.remove(request)
        elif not self.importing.pop(request.id, None) and request in self.waiting:
            self.waiting.remove(request)

    def preempt(self, request: RequestState) -> None:
        """Drop a running request's KV; it goes to the head of the queue to be recomputed."""
        self.on_preempt(request)
        self.taking_part.remove(request)
        assert request.hold
        rows = request.hold.users - request.hold.transfers
        if rows and self.options.late_tokens == "kept":
            self.late[request.id] = rows
        request.hold.release()
        request.hold = None
        request.void_kv()
        request.metrics.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(request)

    def admit(self, request: RequestState) -> bool:
        """Let a waiting request run, or import its KV, if there are pages for it.

        Requests whose KV must be imported are left for ``take_admitted_imports``.
        """
        # A request without room here holds none there: the loop would drop them again and again.
        fetches = (
            self.has_more
            and not request.computed
            and self._has_room(request)
            and self.has_more(request)
        )
        if fetches:
            if not self._leaves_next_pages(request):
                return False
            self.waiting.change(request, self.fetch)
        if request.exported and request.exported[0] == self.name:
            _, request.hold = request.exported
            self.kv.reserved.pop(request.hold, None)
            request.exported = None
            self.num_exported -= 1
        elif request.exported and not self.can_import:
            return False
        else:
            by_step = self.kv.paging.take == "step" and request.exported is None
            request.hold = self.reserve(request, request.legs[0], by_step)
        if request.hold is None:
            return False
        self.waiting.remove(request)
        if not request.computed:
            request.computed = request.launched = request.hold.num_cached
            request.metrics.add_cached(request.computed)
        if request.exported is None:
            self.taking_part.add(request)
        else:
            request.sent = max(request.sent, request.hold.num_cached)
            self.importing[request.id] = request
            self._admitted_imports.append(request)
        return True

    def _has_room(self, request: RequestState) -> bool:
        leg = request.legs[0]
        if not (self.has_seat and self.policies.admit(self, request, leg)):
            return False
        return self.kv.num_free >= self.pages_to_take(request, leg)

    def _leaves_next_pages(self, request: RequestState) -> bool:
        """Tell whether each running request can take another page while the request's KV comes.

        Pages of requests on their way cannot be taken back: a decode would wait for the transfer.
        """
        free = self.kv.num_free - self.pages_to_take(request, request.legs[0])
        return free >= len(self.taking_part)

    def never_holds(self, request: RequestState, leg: Leg) -> str | None:
        """Return why even an empty pool cannot hold the leg, with the numbers; None if it can."""
        kv = self.kv
        need = kv.pages_for(min(request.peak_tokens, leg.until or request.peak_tokens))
        if need <= kv.num_pages:
            return None
        return (
            f"request {request.id!r} needs {need} pages of {kv.page_size} tokens "
            f"({request.prompt_len} prompt + {request.max_tokens} output tokens) on instance "
            f"{self.name!r}, which has {kv.num_pages}"
        )

    def reserve(self, request: RequestState, leg: Leg, by_step: bool = False) -> HeldPages | None:
        """Reserve pages for the tokens that ``leg`` starts with, if the admission policy agrees.

        Args:
            by_step: see ``KVShards.reserve``.
        """
        if not self.policies.admit(self, request, leg):
            return None
        placement = self.place(request) if self.kv.is_spread else None
        cached = self.cached_prefix(request, leg)
        hold = self.kv.reserve(request.known_until(leg), cached, placement, by_step)
        if hold:
            hold.session = request.session
        return hold

    def pages_to_take(self, request: RequestState, leg: Leg) -> int:
        """Return the number of free pages per slice that ``reserve`` would use."""
        cached = self.cached_prefix(request, leg)
        return self.kv.pages_to_take(request.known_until(leg), cached)

    def cached_prefix(self, request: RequestState, leg: Leg) -> list[CachedPage]:
        """Return the cached pages that a request can start with, or that need not be sent here.

        The last known token is left to be computed, because it yields the next one.
        """
        if not (self.kv.cache and request.prompt_token_ids):
            return []
        if not (request.takes_cached or request.computed or request.hold):
            return []
        most = request.known_until(leg) - 1
        # Not beyond the end of the leg before this one.
        if request.exported:
            most = min(most, request.computed)
        elif request.hold and (until := request.legs[0].until) is not None:
            most = min(most, until)
        return self.kv.cache.match(request.page_digests(self.page_size, most // self.page_size))

    def cached_tokens(self, request: RequestView) -> int:
        """Return how many of the request's prompt tokens have KV entries in the prefix cache."""
        assert isinstance(request, RequestState)
        found = len(self.cached_prefix(request, Leg(self.name))) * self.page_size
        return min(found, request.prompt_len - 1)

    def keep_prefix(self, request: RequestState, launches: bool = False) -> None:
        """Offer the request's pages that have become full to the prefix cache.

        Args:
            launches: whether a step is being launched, not committed.
        """
        entries = request.computed
        if self.caches_launched:
            ahead = request.launched
            entries = min(ahead, request.num_known) if launches else ahead - request.pending
        hold, full = request.hold, entries // self.page_size
        if self.kv.cache and hold and full > hold.num_hashed and request.prompt_token_ids:
            hold.keep(request.page_digests(self.page_size, full))

    def forget_prefix(self, request: RequestState) -> None:
        """Make the prefix cache forget the request's pages."""
        if self.kv.cache and request.prompt_token_ids:
            full = request.num_known // self.page_size
            self.kv.cache.forget(request.page_digests(self.page_size, full))

    def reserve_ahead(
        self, request: RequestState, leg: Leg, past_others: bool = False
    ) -> HeldPages | None:
        """Reserve pages for a request that is still on another instance, if no request waits here.

        The pages are taken back when a running request needs them.

        Args:
            past_others: reserve even if requests wait here.
        """
        if (self.waiting and not past_others) or not self.can_import:
            return None
        hold = self.reserve(request, leg)
        if hold:
            self.kv.reserved[hold] = request.drop_incoming
            request.sent = max(request.sent, hold.num_cached)
        return hold

    def take_admitted_imports(self) -> list[RequestState]:
        """Return the requests admitted since the last call whose transfers must be started."""
        admitted, self._admitted_imports = self._admitted_imports, []
        return admitted

    @property
    def keeps_pages(self) -> bool:
        """True if the next free pages are kept for a running request.

        A request with more slices in a shard than others needs more pages there to continue than
        others need to be admitted. Without this rule they could take its freed pages again and
        again.
        """
        last = self.lacks_pages
        return last is not None and last in self.taking_part and not last.paused

    @property
    def has_seat(self) -> bool:
        """True if one more request may run."""
        return len(self.taking_part) + len(self.importing) < self.options.max_num_seqs

    @property
    def can_import(self) -> bool:
        """True if one more request may be imported."""
        return self.has_seat and len(self.importing) < self.options.max_transfers_in_flight
