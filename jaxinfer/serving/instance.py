"""One instance: its queue, its running requests, its pages, and the planning of its steps."""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from jaxinfer.serving.decode_group import DecodeGroup
from jaxinfer.serving.page_pool import Hold, KVShards
from jaxinfer.serving.policies import Policies
from jaxinfer.serving.prefix_cache import CachedPage, page_digests
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.step_fit import StepFit
from jaxinfer.serving.system import Leg
from jaxinfer.serving.world import Batch, Row


@dataclass(frozen=True)
class InstanceOptions:
    """Limits of one instance.

    Attributes:
        max_num_seqs: requests that run or are being imported, at most.
        max_num_batched_tokens: tokens computed in one step, at most.
        max_in_flight: batches launched and not yet committed, at most: one per pipeline stage,
            and one more to launch ahead.
        launch_ahead: a decode may be launched while its input token is still on the device.
        chunks_in_flight: 1 if a prompt's chunk waits for the end of the last one's step.
        max_transfers_in_flight: requests being imported, at most.
        watermark: fraction of the pages that admission leaves free.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_in_flight: int = 2
    launch_ahead: bool = True
    chunks_in_flight: Literal[1, "all"] = "all"
    max_transfers_in_flight: int = 4
    watermark: float = 0.01


class Instance:
    """Queue, running requests and pages of one full copy of the weights.

    Args:
        groups_decodes: advance decodes together, where the world looks at no token and the system
            at no step.

    Attributes:
        waiting: requests whose leg runs here and that have no pages here yet.
        importing: requests whose KV is on its way here; they have their pages.
        group: the decodes advanced together; None if each is a row.
        num_exported: requests whose pages wait here to be fetched by their next leg's instance.
        in_flight: batches launched and not yet committed.
        fit: how long steps take here, where that has been profiled.
        role: a name for the system's use; ``next_role`` replaces it once all requests have left.
    """

    def __init__(
        self,
        name: str,
        kv: KVShards,
        options: InstanceOptions | None = None,
        policies: Policies | None = None,
        role: str = "",
        fit: StepFit | None = None,
        groups_decodes: bool = False,
    ) -> None:
        self.name = name
        self.kv = kv
        self.options = options or InstanceOptions()
        self.policies = policies or Policies()
        self.role = role
        self.fit = fit
        self.next_role: str | None = None
        self.waiting: deque[RequestState] = deque()
        self.importing: dict[str, RequestState] = {}
        self._running: dict[str, RequestState] = {}
        self.num_exported = 0
        self.in_flight = 0
        self.num_preemptions = 0
        self.watermark_pages = math.ceil(self.options.watermark * kv.num_pages)
        self._admitted_imports: list[RequestState] = []
        # Of the batch that is being formed: decodes of the group, and the KV entries they see.
        self._grouped = self._grouped_context = 0
        # Those running that are not in the group, in the order of admission, too.
        self._ungrouped: dict[str, RequestState] = {}
        # A decode in flight cannot be launched in the next step unless it may be launched ahead.
        together = self.options.launch_ahead or self.options.max_in_flight == 1
        self.group = DecodeGroup(kv.page_size) if groups_decodes and together else None

    @property
    def running(self) -> Mapping[str, RequestState]:
        """Requests that take part in steps, by id, in the order of their admission."""
        if self.group:
            self.group.settle()
        return self._running

    @property
    def num_free_pages(self) -> int:
        """Pages per slice of KV heads that are free in every shard."""
        return self.kv.num_free

    @property
    def free_pages_by_shard(self) -> list[int]:
        """All free pages of each shard."""
        return [shard.pool.num_free for shard in self.kv.shards]

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.kv.page_size

    @property
    def max_num_batched_tokens(self) -> int:
        """Tokens computed in one step, at most."""
        return self.options.max_num_batched_tokens

    @property
    def num_requests(self) -> int:
        """Requests waiting, importing or running here."""
        return len(self.waiting) + len(self.importing) + len(self._running)

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs here or is on its way."""
        return not self._running and not self.importing

    @property
    def draining(self) -> bool:
        """Whether a new role waits for the last request to leave."""
        return self.next_role is not None

    def take_role_when_drained(self) -> bool:
        """Change the role if one is due and nothing is left of the old one."""
        if self.next_role is None or self.num_requests or self.num_exported:
            return False
        self.role, self.next_role = self.next_role, None
        return True

    def form_batch(self) -> Batch | None:
        """The next step by this instance's policy, whose rows ``plan_row`` has launched."""
        if self.in_flight >= self.options.max_in_flight:
            return None
        self._grouped, self._grouped_context = 0, 0
        rows = self.policies.form_batch(self)
        if not rows and not self._grouped:
            return None
        self.in_flight += 1
        return Batch(
            self.name, rows, len(self.waiting), len(self._running), self.kv.num_in_use,
            self._grouped, self._grouped_context,
        )  # fmt: skip

    def ungrouped(self) -> list[RequestState]:
        """Running requests that each need a row of their own."""
        return list(self._ungrouped.values())

    def launch_group(self, budget: int) -> int:
        """Launch all decodes that go together, for at most ``budget`` tokens; how many they are.

        Where there is not room and budget for all of them, and for all other decodes, none does:
        it is the policy then that decides who waits or leaves.
        """
        if (group := self.group) is None:
            return 0
        group.retire()
        others = 0
        for request in self.ungrouped():
            if group.takes(request) and not self._follows_a_chunk(request):
                group.join(request)
                del self._ungrouped[request.id]
            else:
                others += 1
        if not group.active:
            return 0
        full = group.full()
        if len(full) + others > self.kv.num_free or len(group.active) + others > budget:
            for request in self._running.values():
                if request in group:
                    group.leave(request)
            self._ungrouped = dict(self._running)
            return 0
        self._grouped, self._grouped_context = group.launch(full)
        return self._grouped

    def commit_group(self, end: float) -> tuple[list[RequestState], list[Row]]:
        """A step of the group has ended.

        Returns:
            The requests that end with it, in the order of admission; and the step's rows of those
            that have left the group since it was launched.
        """
        assert self.group
        ended, rows = self.group.commit(end)
        if len(ended) > 1:
            ids = {request.id for request in ended}
            ended = [request for id, request in self._running.items() if id in ids]
        return ended, rows

    def leave_group(self, request: RequestState) -> None:
        """Have a request be a row of its own again, with its integers as they are."""
        if self.group and request in self.group:
            self.group.leave(request)
            self._ungrouped = {id: r for id, r in self._running.items() if r not in self.group}

    def plan_row(self, request: RequestState, count: int, rows: list[Row]) -> Row | None:
        """Launch a row of ``count`` tokens with its pages; None if it has to wait.

        Where pages run out, requests are preempted that have no row in ``rows``, the batch so
        far; the last one is ``request`` itself.
        """
        hold = request.hold
        if hold is None or request.paused or request.slice_move:
            return None  # Without pages: preempted for another row of this batch.
        pending = request.pending
        if pending and not self.options.launch_ahead:
            return None
        start = request.launched
        if self._follows_a_chunk(request):
            return None
        stop = start + count
        if stop > hold.capacity and not self._make_room(request, stop, rows):
            return None
        known = request.prompt_len + len(request.output_token_ids)
        samples = stop == known + pending
        request.launched = stop
        request.pending += samples
        hold.users += 1
        return Row(request, start, count, samples, start >= known, request.epoch, hold)

    def _follows_a_chunk(self, request: RequestState) -> bool:
        """Whether what comes next waits for the end of a step that samples nothing."""
        if self.options.chunks_in_flight != 1:
            return False
        return request.launched > request.computed and not request.pending

    def _make_room(self, request: RequestState, num_tokens: int, rows: list[Row]) -> bool:
        assert request.hold
        planned: set[str] | None = None
        while not request.hold.grow(num_tokens):
            if self.kv.num_pinned:
                return False  # Pages come back without anyone losing work.
            if self.kv.take_back_reserved():
                continue
            if self.num_exported or any(other.slice_move for other in self._running.values()):
                return False  # Here, too.
            if planned is None:
                planned = {row.request.id for row in rows}
                if self._grouped and self.group:
                    planned |= self.group.active.keys()
            victims = [other for other in self._running.values() if other.id not in planned]
            victim = self.policies.victim(victims)
            if victim is request and self.importing:
                return False  # What is on its way came later; it can be preempted on arrival.
            if len(victims) == 1 and request.id != next(reversed(self._running)):
                return False  # Those that came later are in this batch: their turn comes first.
            self.preempt(victim)
            if victim is request:
                return False
        return True

    def remove(self, request: RequestState) -> None:
        """Take a request out of wherever it is here; its pages are the caller's to free."""
        if self.runs(request):
            self._stop(request)
        elif not self.importing.pop(request.id, None) and request in self.waiting:
            self.waiting.remove(request)

    def runs(self, request: RequestState) -> bool:
        """Whether the request takes part in steps here."""
        return request.id in self._running

    def run(self, request: RequestState) -> None:
        """Have a request take part in steps; its pages and its KV are here."""
        self._running[request.id] = self._ungrouped[request.id] = request

    def _stop(self, request: RequestState) -> None:
        self.leave_group(request)
        del self._running[request.id]
        self._ungrouped.pop(request.id, None)

    def preempt(self, request: RequestState) -> None:
        """Drop a running request's KV; it is recomputed here, from the head of the queue."""
        self._stop(request)
        assert request.hold
        request.hold.release()
        request.hold = None
        request.void_kv()
        request.metrics.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(request)

    def admit_next(self) -> RequestState | None:
        """Move the next waiting request to ``running``, with its pages, and return it.

        Requests whose KV lies elsewhere are admitted on the way; see ``take_admitted_imports``.
        """
        while self.waiting and self.has_seat:
            request = self.policies.order(self.waiting)
            if request.exported and request.exported[0] == self.name:
                _, request.hold = request.exported
                request.exported = None
                self.num_exported -= 1
            elif request.exported and not self.can_import:
                return None
            else:
                request.hold = self.reserve(request, request.legs[0])
            if request.hold is None:
                return None
            if not request.computed:
                request.computed = request.launched = len(request.hold.cached) * self.page_size
                request.metrics.add_cached(request.computed)
            self.waiting.remove(request)
            if request.exported is None:
                self.run(request)
                return request
            self.importing[request.id] = request
            self._admitted_imports.append(request)
        return None

    def never_holds(self, request: RequestState, leg: Leg) -> str | None:
        """Why not even an empty pool has room for the leg, with the numbers; None if it has."""
        kv = self.kv
        need = kv.pages_for(min(request.peak_tokens, leg.until or request.peak_tokens))
        if need <= kv.num_pages:
            return None
        return (
            f"request {request.id!r} needs {need} pages of {kv.page_size} tokens "
            f"({request.prompt_len} prompt + {request.max_tokens} output tokens) on instance "
            f"{self.name!r}, which has {kv.num_pages}"
        )

    def reserve(self, request: RequestState, leg: Leg) -> Hold | None:
        """Pages for the tokens that ``leg`` starts with, if the admission policy agrees."""
        if not self.policies.admit(self, request, leg):
            return None
        return self.kv.reserve(request.known_until(leg), self.cached_prefix(request, leg))

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
        return self.kv.cache.match(page_digests(request, self.page_size, count))

    def keep_prefix(self, request: RequestState) -> None:
        """Offer the request's pages that have become full to the prefix cache."""
        hold, full = request.hold, request.computed // self.page_size
        if self.kv.cache and hold and full > hold.num_hashed and request.prompt_token_ids:
            self.kv.cache.keep(hold, page_digests(request, self.page_size, full))

    def reserve_ahead(self, request: RequestState, leg: Leg) -> Hold | None:
        """Pages for a request that is still elsewhere, where nobody here waits for room.

        They are taken back when a running request needs them.
        """
        if self.waiting or not self.can_import:
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
    def has_seat(self) -> bool:
        """Whether one more request may run."""
        return len(self._running) + len(self.importing) < self.options.max_num_seqs

    @property
    def can_import(self) -> bool:
        """Whether one more request may be fetched."""
        return self.has_seat and len(self.importing) < self.options.max_transfers_in_flight
