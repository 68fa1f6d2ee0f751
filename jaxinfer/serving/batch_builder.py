"""The batch that a policy is forming."""

from collections.abc import Collection, Sequence

from jaxinfer.serving.batch import Batch, Row, shard_work
from jaxinfer.serving.features.decode_group import DecodeGroup
from jaxinfer.serving.features.half_batches import halve, in_parts
from jaxinfer.serving.instance import Instance
from jaxinfer.serving.request_state import RequestState


class BatchBuilder:
    """The next step of one instance. Requests that are added are marked as launched.

    Attributes:
        instance: instance that will run the step.
        budget: tokens that the step may still compute.
        prompt_budget: how many of these may be tokens of prompts or recomputed tokens.
        rows: rows so far.
        grouped: number of additional decodes that advance together.
    """

    __slots__ = (
        "_before",
        "_context",
        "_group",
        "_spans",
        "budget",
        "grouped",
        "instance",
        "prompt_budget",
        "rows",
    )

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.budget = whole = instance.options.max_num_batched_tokens
        limit = instance.prompt_budget
        self.prompt_budget = whole if limit is None else min(limit, whole)
        self.rows: list[Row] = []
        self.grouped = self._context = self._before = 0
        self._group: DecodeGroup | None = None
        self._spans: list[tuple[int, int]] | None = [] if instance.asks_spans else None

    def batch(self) -> Batch | None:
        """Return the batch that has been formed; None if it is empty."""
        if not self.rows and not self.grouped:
            return None
        instance = self.instance
        batch = Batch(
            instance.name,
            self.rows,
            len(instance.waiting),
            len(instance.taking_part),
            instance.kv.num_in_use,
            self.grouped,
            self._context,
            spans=self._spans,
            among=(self._before, self._end_of_decodes()) if self.grouped else (0, 0),
        )
        if instance.kv.is_spread:
            batch.work.shards = shard_work(self.rows)
            if instance.halves_pay:
                halve(batch, instance.shards, instance.halves_pay)
        elif instance.options.micro_batches > 1:
            in_parts(batch, instance.options.micro_batches)
        return batch

    def add_group(self, most: int | None = None) -> None:
        """Add all decodes of the ready group, or the ``most`` of them that were admitted first.

        If room or budget does not suffice for all of them and for all other decodes, none is added;
        the policy then decides which requests wait or leave.
        """
        instance = self.instance
        running = instance.taking_part
        if (group := running.ready_group()) is None:
            return
        group.retire()
        others, decodes, planned = 0, 0, {row.request.id for row in self.rows}
        for request in running.ungrouped():
            if request.id in planned:
                continue  # It continues in this step.
            waits = request.pending and not instance.options.launch_ahead
            if group.takes(request) and not waits and not self._follows_a_chunk(request):
                running.join(group, request)
            else:
                others += 1
                decodes += most is not None and request.leg_goal == request.launched + 1
        if not group.active:
            return
        if most is not None:
            if decodes and len(group.active) + decodes > most:
                running.dissolve(group)  # Some of these may have been admitted first.
                return
            running.trim(group, most)
        full = group.num_full()
        if full + others > instance.kv.num_free or len(group.active) + others > self.budget:
            running.dissolve(group)
            return
        self._group = group
        if self._spans is not None:
            self._spans.append(group.span())
        self._before = len(self.rows)
        self.grouped, self._context = running.launch(group, full)
        self.budget -= self.grouped

    def _end_of_decodes(self) -> int:
        """Return the index of the first row after the group that leaves tokens to be computed."""
        for index in range(self._before, len(self.rows)):
            row = self.rows[index]
            ends_leg = row.request.legs[0].until == row.start + 1
            if row.count > 1 or not (row.samples or ends_leg):
                return index
        return len(self.rows)

    def ungrouped(self) -> list[RequestState]:
        """Return the running requests that each need their own row."""
        return self.instance.taking_part.ungrouped()

    def add(self, request: RequestState, count: int) -> bool:
        """Add a row of ``count`` tokens within the budget; return False if it has to wait.

        If pages run out, requests outside this batch are preempted; the last candidate is
        ``request``.
        """
        instance = self.instance
        hold = request.hold
        if hold is None or request.paused or request.slice_move:
            return False  # It was preempted for another row of this batch.
        pending = request.pending
        if pending and not instance.options.launch_ahead:
            return False
        if self._follows_a_chunk(request):
            return False
        start = request.launched
        stop = start + count
        if stop > hold.capacity:
            if not self._make_room(request, stop):
                instance.lacks_pages = request if instance.kv.is_spread else None
                return False
            instance.lacks_pages = None
        known = request.prompt_len + len(request.output_token_ids)
        samples = stop == known + pending
        request.launched = stop
        request.pending += samples
        hold.users += 1
        self.rows.append(Row(request, start, count, samples, start >= known, request.epoch, hold))
        self.budget -= count
        if instance.caches_launched:
            instance.keep_prefix(request, launches=True)
        return True

    def add_chunk(self, request: RequestState) -> bool:
        """Add as many of the request's uncomputed tokens as the budgets allow."""
        count = min(request.leg_goal - request.launched, self.budget, self.prompt_budget)
        if count <= 0 or not self.add(request, count):
            return False
        self.prompt_budget -= count
        return True

    def admit(self, limit: int | None = None) -> RequestState | None:
        """Admit the next waiting request, give it pages, and return it; None if it has to wait.

        Requests whose KV is on another instance are admitted, too, and their KV is fetched; the
        next request is then tried.

        Args:
            limit: largest number of tokens that it may have to compute at first.
        """
        instance = self.instance
        if instance.keeps_pages:
            return None
        while (waiting := instance.admissible) and instance.has_seat:
            request = instance.policies.order(waiting)
            if not self.prompt_budget and request.exported is None:
                return None
            if limit is not None:
                todo = request.known_until(request.legs[0]) - request.computed
                if todo > limit and request.exported is None:
                    return None
            if not instance.admit(request):
                return None
            if request in instance.taking_part:
                return request
        return None

    def _follows_a_chunk(self, request: RequestState) -> bool:
        """Tell whether a request must wait for a step of its own prompt that samples nothing."""
        if self.instance.options.chunks_in_flight != 1:
            return False
        return request.launched > request.computed and not request.pending

    def _make_room(self, request: RequestState, num_tokens: int) -> bool:
        instance, hold = self.instance, request.hold
        assert hold
        if num_tokens > request.leg_goal:
            # No pool can hold it, so preemptions would never end.
            raise ValueError(
                f"add: request {request.id!r} up to {num_tokens} KV entries, may have "
                f"{request.leg_goal} in this step"
            )
        planned: set[str] | None = None
        asked: set[int] = set()
        while not hold.grow(num_tokens):
            if instance.kv.num_pinned:
                return False  # This frees pages without a preemption.
            if instance.kv.take_back_reserved():
                continue
            if instance.num_exported or instance.taking_part.any_moves:
                return False  # The same here.
            if planned is None:
                planned = self._planned()
            victims, newest = instance.taking_part.others_than(planned), None
            if instance.kv.is_spread:
                lacking = hold.lacking(num_tokens)
                if self._moves_make_room(request, lacking, asked):
                    return False
                victims = [each for each in victims if _lies_in(each, lacking)]
                everyone = instance.taking_part.by_id().values()
                newest = [each for each in everyone if _lies_in(each, lacking)][-1]
            victim = instance.policies.victim(victims)
            if victim is request and newest and request.launched > request.computed:
                return False  # Alone here, it would lose its token in flight again and again.
            if victim is request and instance.importing:
                return False  # Requests on their way came later; they can be preempted on arrival.
            if len(victims) == 1 and request is not (newest or instance.taking_part.newest):
                return False  # Later requests are in this batch; they are preempted first.
            instance.preempt(victim)
            if victim is request:
                return False
        return True

    def _moves_make_room(
        self, request: RequestState, lacking: Sequence[int], asked: set[int]
    ) -> bool:
        """Ask the system to clear full shards; tell whether slices are now being moved out.

        Args:
            asked: shards that the system has already been asked about; those of ``lacking`` are
                added.
        """
        for shard in lacking:
            if shard not in asked:
                asked.add(shard)
                self.instance.make_room(request, shard)
        return self.instance.taking_part.any_moves

    def _planned(self) -> set[str]:
        """Return the ids of the requests in this batch."""
        planned = {row.request.id for row in self.rows}
        return planned | self._group.active.keys() if self._group else planned


def _lies_in(request: RequestState, shards: Collection[int]) -> bool:
    """Tell whether slices of a request lie in one of these shards."""
    return request.hold is not None and any(request.hold.tables[shard] for shard in shards)
