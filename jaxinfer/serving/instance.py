"""An instance: its queue, its running requests and its pages."""

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal, Protocol

from jaxinfer.serving.batch import Batch
from jaxinfer.serving.features.decode_group import DecodeGroup
from jaxinfer.serving.features.half_batches import ChooseHalves
from jaxinfer.serving.features.head_slices import Placement
from jaxinfer.serving.kv_shards import HeldPages, KVShards
from jaxinfer.serving.page_pool import Shard
from jaxinfer.serving.prefix_cache import CachedPage
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.running import Running
from jaxinfer.serving.step_fit import StepFit
from jaxinfer.serving.system import Counts, Leg
from jaxinfer.serving.waiting import Waiting


@dataclass(frozen=True)
class InstanceOptions:
    """Limits of one instance.

    Attributes:
        max_num_seqs: largest number of requests that run or are being imported.
        max_num_batched_tokens: largest number of tokens computed in one step.
        max_in_flight: largest number of batches launched and not yet committed: one per pipeline
            stage, and one more to launch ahead.
        launch_ahead: a decode may be launched while its input token is still on the device.
        chunks_in_flight: 1 if a prompt's chunk waits until the step of its previous chunk has
            ended.
        max_transfers_in_flight: largest number of requests being imported.
        watermark: fraction of the pages that admission leaves free.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_in_flight: int = 2
    launch_ahead: bool = True
    chunks_in_flight: Literal[1, "all"] = "all"
    max_transfers_in_flight: int = 4
    watermark: float = 0.01


class InstancePolicies(Protocol):
    """The decisions made for an instance; ``serving/policies.py`` has those that there are."""

    @property
    def repeats_decodes(self) -> bool:
        """True if decodes of all are followed by the same while none waits, comes or ends."""

    def order(self, waiting: Sequence[RequestState]) -> RequestState:
        """Choose the waiting request that is to be admitted next."""

    def admit(self, instance: "Instance", request: RequestState, leg: Leg) -> bool:
        """Tell whether there is room for a request that starts a leg."""

    def next_batch(self, instance: "Instance") -> Batch | None:
        """The next step, whose rows have been launched; None if nothing can take part in one."""

    def victim(self, candidates: Sequence[RequestState]) -> RequestState:
        """Choose the request that loses its pages where one more is needed."""


class Instance:
    """Queue, running requests and pages of one full copy of the weights.

    Args:
        groups_decodes: advance decodes together, where the world looks at no token and the system
            at no step; not where their slices lie in several places.
        num_output: output tokens that end a request, where the world knows better than
            ``max_tokens``; only for decodes that are advanced together.

    Attributes:
        waiting: requests whose leg runs here and that have no pages here yet.
        importing: requests whose KV is on its way here; they have their pages.
        taking_part: requests that take part in steps.
        num_exported: requests whose pages wait here to be fetched by their next leg's instance.
        in_flight: batches launched and not yet committed.
        place: asks where a request's slices are to lie; ``make_room``, before a preemption, for
            moves that take the place of it, where a shard (the second argument) lacks pages. Both
            only where a stage has several shards.
        halves_pay: asks whether a step is to be computed as two halves of its rows in turn; None
            where none is.
        asks_spans: whether batches say the least and most KV entries that a decode sees.
        fit: how long steps take here, where that has been profiled.
        on_preempt: called with each request that is to lose its pages.
        lacks_pages: requests that could not continue for want of pages, if a stage has several
            shards.
        prompt_budget: prompt tokens of one step, at most; None for no limit of their own.
        role: a name for the system's use; ``next_role`` replaces it once all requests have left.
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
        self._note_watermark()
        self.place: Callable[[RequestState], Placement | None] = lambda request: None
        self.make_room: Callable[[RequestState, int], None] = lambda request, shard: None
        self.on_preempt: Callable[[RequestState], None] = lambda request: None
        self.halves_pay: ChooseHalves | None = None
        self.asks_spans = False
        self.lacks_pages: RequestState | None = None
        self.prompt_budget: int | None = None
        self._admitted_imports: list[RequestState] = []
        counted = len(kv.shards) == 1 and not kv.has_numbers
        self._repeats = groups_decodes and counted and policies.repeats_decodes
        page_size = kv.page_size if groups_decodes and not kv.is_spread else None
        keep = self.keep_prefix if kv.cache else None
        self.taking_part = Running(page_size, self.options.launch_ahead, num_output, keep)

    def go_without(self, shards: Sequence[int]) -> None:
        """Have all shards of the KV but these, by their numbers; those that are back are empty."""
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
        """Requests that take part in steps."""
        return len(self.taking_part)

    @property
    def kv_entries(self) -> int:
        """KV entries that exist of the requests that take part in steps."""
        return self.taking_part.counts().kv_entries

    @property
    def prompt_tokens_left(self) -> int:
        """Prompt tokens that requests waiting, importing or running here have still to compute."""
        return self.counts.prompt_tokens_left

    @property
    def counts(self) -> Counts:
        """Counts of what is here, taken in one pass."""
        to_come = self.waiting.prompt_tokens_left
        for request in self.importing.values() if self.importing else ():
            if request.computed < request.prompt_len:  # Mostly its prompt is all there.
                to_come += request.prompt_tokens_left
        return self.taking_part.counts(to_come)

    def longest_decodes(self, count: int, but: Container[str] = ()) -> Sequence[tuple[str, int]]:
        """Ids and KV entries of the ``count`` decodes that have the most, the longest first."""
        return self.taking_part.longest_decodes(count, but)

    @property
    def num_pages(self) -> int:
        """Pages per slice of KV heads of the largest request that it can hold."""
        return self.kv.num_pages

    @property
    def num_free_pages(self) -> int:
        """Pages per slice of KV heads of the largest request for which there is room."""
        return self.kv.num_free

    @property
    def num_awaited_pages(self) -> int:
        """Pages of those that wait here, but for those whose KV lies here already."""
        return self.waiting.pages

    @property
    def shards(self) -> Sequence[Shard]:
        """The pieces of its KV."""
        return self.kv.shards

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.kv.page_size

    @property
    def max_num_batched_tokens(self) -> int:
        """Tokens computed in one step, at most."""
        return self.options.max_num_batched_tokens

    @property
    def max_num_seqs(self) -> int:
        """Largest number of requests that run or are being imported."""
        return self.options.max_num_seqs

    @property
    def num_requests(self) -> int:
        """Requests waiting, importing or running here."""
        return len(self.waiting) + len(self.importing) + len(self.taking_part)

    @property
    def is_idle(self) -> bool:
        """True if nothing runs here or is on its way."""
        return not self.taking_part and not self.importing

    @property
    def draining(self) -> bool:
        """True if a new role waits for the last request to leave."""
        return self.next_role is not None

    def take_role_when_drained(self, now: float) -> bool:
        """Change the role if one is due and nothing is left of the old one."""
        if self.next_role is None or self.num_requests or self.num_exported:
            return False
        self._role_s, self._role_since = self.role_seconds(now), now
        self.role, self.next_role = self.next_role, None
        return True

    def role_seconds(self, now: float) -> dict[str, float]:
        """Return the seconds for which it has had each role, ``""`` being none."""
        before = self._role_s.get(self.role, 0.0)
        return self._role_s | {self.role: before + now - self._role_since}

    def follow(self, lost: "Instance", now: float) -> None:
        """Go on with the figures of the one whose place it takes."""
        self.num_preemptions = lost.num_preemptions
        self._role_s, self._role_since = lost.role_seconds(now), now

    def next_batch(self) -> Batch | None:
        """The next step by this instance's policy, whose rows have been launched."""
        if self.in_flight >= self.options.max_in_flight:
            return None
        for request in list(self.waiting.pushed.values()):
            if self.keeps_pages or not self.admit(request):
                break
        batch = self.policies.next_batch(self)
        self.in_flight += batch is not None
        return batch

    def steady_group(self) -> DecodeGroup | None:
        """The decodes that further steps are of, until one ends, lacks pages, or another comes."""
        if self.waiting or self.in_flight < self.options.max_in_flight or not self._repeats:
            return None
        return self.taking_part.steady_group()

    def remove(self, request: RequestState) -> None:
        """Take a request out of wherever it is here; its pages are the caller's to free."""
        if request in self.taking_part:
            self.taking_part.remove(request)
        elif not self.importing.pop(request.id, None) and request in self.waiting:
            self.waiting.remove(request)

    def preempt(self, request: RequestState) -> None:
        """Drop a running request's KV; it is recomputed here, from the head of the queue."""
        self.on_preempt(request)
        self.taking_part.remove(request)
        assert request.hold
        request.hold.release()
        request.hold = None
        request.void_kv()
        request.metrics.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(request)

    def admit(self, request: RequestState) -> bool:
        """Have a waiting request run, or import its KV, where there are pages for it.

        Those whose KV is to be imported are left for ``take_admitted_imports``.
        """
        if request.exported and request.exported[0] == self.name:
            _, request.hold = request.exported
            request.exported = None
            self.num_exported -= 1
        elif request.exported and not self.can_import:
            return False
        else:
            request.hold = self.reserve(request, request.legs[0])
        if request.hold is None:
            return False
        self.waiting.remove(request)
        if not request.computed:
            request.computed = request.launched = len(request.hold.cached) * self.page_size
            request.metrics.add_cached(request.computed)
        if request.exported is None:
            self.taking_part.add(request)
        else:
            self.importing[request.id] = request
            self._admitted_imports.append(request)
        return True

    def never_holds(self, request: RequestState, leg: Leg) -> str | None:
        """Say why not even an empty pool has room for the leg, with the numbers; None if it has."""
        kv = self.kv
        need = kv.pages_for(min(request.peak_tokens, leg.until or request.peak_tokens))
        if need <= kv.num_pages:
            return None
        return (
            f"request {request.id!r} needs {need} pages of {kv.page_size} tokens "
            f"({request.prompt_len} prompt + {request.max_tokens} output tokens) on instance "
            f"{self.name!r}, which has {kv.num_pages}"
        )

    def reserve(self, request: RequestState, leg: Leg) -> HeldPages | None:
        """Pages for the tokens that ``leg`` starts with, if the admission policy agrees."""
        if not self.policies.admit(self, request, leg):
            return None
        placement = self.place(request) if self.kv.is_spread else None
        cached = self.cached_prefix(request, leg)
        return self.kv.reserve(request.known_until(leg), cached, placement)

    def pages_to_take(self, request: RequestState, leg: Leg) -> int:
        """Free pages per slice that ``reserve`` would use up."""
        cached = self.cached_prefix(request, leg)
        return self.kv.pages_to_take(request.known_until(leg), cached)

    def cached_prefix(self, request: RequestState, leg: Leg) -> list[CachedPage]:
        """Cached pages with which a request can start here.

        Its last known token is left to compute: it yields the next.
        """
        if not (self.kv.cache and request.takes_cached and request.prompt_token_ids):
            return []
        if request.computed or request.hold:
            return []
        count = (request.known_until(leg) - 1) // self.page_size
        return self.kv.cache.match(request.page_digests(self.page_size, count))

    def keep_prefix(self, request: RequestState) -> None:
        """Offer the request's pages that have become full to the prefix cache."""
        hold, full = request.hold, request.computed // self.page_size
        if self.kv.cache and hold and full > hold.num_hashed and request.prompt_token_ids:
            hold.keep(request.page_digests(self.page_size, full))

    def forget_prefix(self, request: RequestState) -> None:
        """Have the prefix cache give the request's pages to no other request."""
        if self.kv.cache and request.prompt_token_ids:
            full = request.num_known // self.page_size
            self.kv.cache.forget(request.page_digests(self.page_size, full))

    def reserve_ahead(
        self, request: RequestState, leg: Leg, past_others: bool = False
    ) -> HeldPages | None:
        """Reserve pages for a request that is still elsewhere, if no request here waits for room.

        They are taken back when a running request needs them.

        Args:
            past_others: whether to reserve even if requests wait here.
        """
        if (self.waiting and not past_others) or not self.can_import:
            return None
        hold = self.reserve(request, leg)
        if hold:
            self.kv.reserved[hold] = request.drop_incoming
        return hold

    def take_admitted_imports(self) -> list[RequestState]:
        """Requests admitted since the last call whose transfer is to be started."""
        admitted, self._admitted_imports = self._admitted_imports, []
        return admitted

    @property
    def keeps_pages(self) -> bool:
        """True if the next free pages are for one that runs.

        A request with more slices in a shard than others needs more pages there to go on than they
        do to come in: they would take what was freed for it, for ever.
        """
        last = self.lacks_pages
        return last is not None and last in self.taking_part and not last.paused

    @property
    def has_seat(self) -> bool:
        """True if one more request may run."""
        return len(self.taking_part) + len(self.importing) < self.options.max_num_seqs

    @property
    def can_import(self) -> bool:
        """True if one more request may be fetched."""
        return self.has_seat and len(self.importing) < self.options.max_transfers_in_flight
