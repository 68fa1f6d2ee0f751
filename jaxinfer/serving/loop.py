"""The serving loop: one loop for every system and both worlds."""

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from jaxinfer.errors import JaxinferError
from jaxinfer.request import FinishReason
from jaxinfer.serving.assignments import Assignments
from jaxinfer.serving.hooks import Hooks
from jaxinfer.serving.instance import Instance
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.system import Assignment, System
from jaxinfer.serving.views import Leg
from jaxinfer.serving.world import (
    Arrival,
    Event,
    GoesWithout,
    InstanceBack,
    InstanceLost,
    StepDone,
    Tick,
    TransferDone,
    World,
)

Stop = tuple[FinishReason, int | str | None]
# A system has stalled after this many successive ticks that change nothing.
MAX_IDLE_TICKS = 100_000
# After a loss, a system has this many ticks to open another instance; then its requests fail.
MAX_IDLE_TICKS_AFTER_LOSS = 10


class Runs(Protocol):
    """Launches successive decode steps without the loop, with the same result as with it."""

    def give(self, instance: Instance) -> None: ...  # noqa: D102

    def go_on(self, apart: bool) -> None: ...  # noqa: D102


class ServingLoop:
    """Takes requests from their arrival to their end on the instances of one system.

    Args:
        world: supplies time and execution.
        instances: all instances, with unique names.
        system: decides where each request runs.
        check_stop: called with each token that has reached the host; if it returns a reason, the
            request ends. Without it, requests end at ``max_tokens``.
        on_finish: called once per request. ``finish_reason`` is set, and ``error`` for a request
            that can never fit, or that was lost with an instance and that no other one takes.
        on_event: called with each committed event except Arrival and Tick.
        predict: called with each arriving request; sets its ``predicted``.
        renew: makes a fresh instance to replace a returning one, from its name.
        runs: launches successive steps of an instance that only decodes.
    """

    def __init__(
        self,
        world: World,
        instances: Iterable[Instance],
        system: System,
        check_stop: Callable[[RequestState, int], Stop | None] | None = None,
        on_finish: Callable[[RequestState], None] = lambda request: None,
        on_event: Callable[[Event], None] = lambda event: None,
        predict: Callable[[RequestState], tuple[int, int] | None] | None = None,
        renew: Callable[[str], Instance] | None = None,
        runs: Runs | None = None,
    ) -> None:
        self.world = world
        self.system = system
        self._hooks = hooks = Hooks(system)
        self.assignments = Assignments(
            world, instances, hooks, self._leg_ended, self._finished, renew
        )
        self._on_finish = on_finish
        self._moving = self.assignments.hand_offs.moving
        self._check_stop = check_stop
        self._on_event = on_event
        self._predict = predict
        self._steps_in_flight = 0
        self._runs = None if system.hears_decodes else runs

    def run(self) -> None:
        """Serve until all requests have arrived and ended, and nothing is in flight."""
        for _ in self.rounds():
            pass

    def rounds(self) -> Iterator[None]:
        """Serve as ``run`` does, but yield after each round of events and launches."""
        self._ask_for_tick()
        idle_ticks = 0
        while True:
            if self._runs and not self.assignments.unrouted:
                # Until a request comes, each instance then changes by its own steps alone.
                apart = self._hooks.only_routes and not self.assignments.sends
                self._runs.go_on(apart)
            events = self.world.due_events()
            for event in events:
                self._apply(event)
            if self.system.tick_interval is not None and any(isinstance(e, Tick) for e in events):
                self._ask_for_tick()  # Only now is it known whether requests are left.
            self._decide()
            # With nothing in flight, nothing will change on its own.
            while not self._in_flight and (self.assignments.take_roles() or self._drop_unfetched()):
                self._decide()
            if not self._in_flight and not self._more_to_come:
                waits = self.system.tick_interval is not None
                gives_up = not waits or idle_ticks >= MAX_IDLE_TICKS_AFTER_LOSS
                if self.assignments.live and self.assignments.losses.lost and gives_up:
                    self._give_up()
                    if self._in_flight or self.world.arrivals_left():
                        continue
                if not self.assignments.live:
                    return
                idle_ticks += 1
                if not waits or idle_ticks > MAX_IDLE_TICKS:
                    raise JaxinferError(self._explain_stall())
            else:
                idle_ticks = 0
            yield
            if not (self.assignments.live or self._in_flight or self.world.arrivals_left()):
                return  # The expected requests did not come.

    def _ask_for_tick(self) -> None:
        interval = self.system.tick_interval
        if interval is not None and (self.assignments.live or self.world.arrivals_left()):
            self.world.wake_at(self.world.now() + interval)

    def _decide(self) -> None:
        self.assignments.take_roles()  # This comes before routing, which may depend on roles.
        if self.assignments.unrouted:
            self.assignments.route(self._ask_route)
        self._launch()

    def _ask_route(self) -> Iterable[Assignment]:
        return self._hooks.route(self.assignments.unrouted.values(), self.assignments.view())

    def _leg_ended(self, request: RequestState, leg: Leg) -> None:
        if self._hooks.leg_ends:
            self._hooks.leg_ended(request, leg, self.assignments.view())

    def _finished(self, request: RequestState) -> None:
        if self._hooks.finishes:
            self._hooks.finished(request, self.assignments.view())
        self._on_finish(request)

    @property
    def _in_flight(self) -> int:
        return self._steps_in_flight + len(self._moving)

    @property
    def _more_to_come(self) -> bool:
        """True if an arrival or a returning instance is still expected."""
        losses = self.assignments.losses
        waits_for = losses.returning | losses.regaining
        return self.world.arrivals_left() or bool(waits_for)

    # Events are the only places where time advances a request.

    def _apply(self, event: Event) -> None:
        match event:
            case StepDone():
                self._commit_step(event)
                self._on_event(event)
                if self._hooks.steps:
                    self.assignments.act(
                        lambda: self._hooks.step_ended(event, self.assignments.view())
                    )
            case TransferDone():
                self._commit_transfer(event)
                self._on_event(event)
            case Arrival():
                if self._predict:
                    event.request.predicted = self._predict(event.request)
                self.assignments.add(event.request)
            case Tick():
                self.assignments.act(lambda: self._hooks.ticked(self.assignments.view()))
            case InstanceLost() | InstanceBack() | GoesWithout():
                self._steps_in_flight -= self.assignments.apply_loss(event)
                self._on_event(event)

    def _commit_step(self, done: StepDone) -> None:
        instance = self.assignments.instances[done.batch.instance]
        instance.in_flight -= 1
        self._steps_in_flight -= 1
        self.assignments.changed[instance.name] = None
        # These names avoid repeated look-ups: this loop takes most of a simulation's time.
        keeps_launched, check_stop = instance.caches_launched, self._check_stop
        keeps_computed = instance.kv.cache is not None and not keeps_launched
        logprobs, details, prompt_details = done.logprobs, done.details, done.prompt_details
        end, sample = done.end, -1
        rows = done.batch.rows
        if done.batch.grouped:
            rows = instance.taking_part.commit_group(done.batch, end)
        over: list[tuple[RequestState, Stop | None, int]] = []
        for row in rows:
            request, hold = row.request, row.hold
            hold.users -= 1
            if hold.released:
                hold.free_if_unused()
            sample += row.samples
            if row.epoch == request.epoch:
                request.computed = row.start + row.count
                request.pending -= row.samples
                if keeps_computed:
                    instance.keep_prefix(request)
            elif not (instance.late and instance.takes_late(request)):
                continue  # It was preempted, or stopped before this row's input was known.
            if prompt_details and request.id in prompt_details:
                request.prompt_details.update(prompt_details[request.id])
            metrics = request.metrics
            if metrics.first_scheduled is None:
                metrics.first_scheduled = done.start
            if row.samples:
                if logprobs:
                    request.cumulative_logprob += logprobs[sample]
                if details:
                    request.details.append(details[sample])
                token, tokens = done.tokens[sample], request.output_token_ids
                tokens.append(token)
                metrics.token_times.append(end)
                if keeps_launched:
                    instance.keep_prefix(request)
                stop = check_stop(request, token) if check_stop else None
                if stop is None and len(tokens) >= request.max_tokens:
                    stop = ("length", None)
                if stop:
                    over.append((request, stop, request.epoch))
                    continue
            if request.slice_move or request.legs[0].until is not None:
                over.append((request, None, request.epoch))
        # Hooks see all requests in their state after the step.
        for request, stop, epoch in over:
            if epoch != request.epoch:
                continue
            if stop:
                self.assignments.finish(request, *stop)
            else:
                self._after_step(request)

    def _after_step(self, request: RequestState) -> None:
        if request.legs[0].until is not None:
            if request.leg_is_over:
                self.assignments.end_leg(request)
                return
            self.assignments.hand_offs.send_chunk(request)
        if request.slice_move:
            self.assignments.hand_offs.slices.send_rest(request)

    def _commit_transfer(self, done: TransferDone) -> None:
        transfer, request = done.transfer, done.transfer.request
        self.assignments.hand_offs.done(transfer, done.end)
        self.assignments.changed[transfer.source] = self.assignments.changed[transfer.dest] = None
        if self.assignments.runs(request) and request.leg_is_over and not request.slice_move:
            self.assignments.end_leg(request)  # It was cut while its KV was on its way.

    def _give_up(self) -> None:
        """Fail unrouted requests; if nothing is in flight then, fail all: the loop has stalled."""
        assignments = self.assignments
        assignments.losses.fail(assignments.unrouted.values())
        self._decide()
        if not self._in_flight:
            assignments.losses.fail(assignments.live.values())

    def _launch(self) -> None:
        assignments = self.assignments
        while assignments.changed:
            for name in assignments.take_changed():
                instance = assignments.instances[name]
                while batch := instance.next_batch():
                    self._steps_in_flight += 1
                    if assignments.sends_along:
                        assignments.hand_offs.send_along(batch)
                    self.world.launch(batch)
                for request in instance.take_admitted_imports():
                    assignments.hand_offs.pull(request)
                    if request in instance.taking_part:  # Nothing had to be sent.
                        assignments.changed[name] = None
                if self._runs:
                    self._runs.give(instance)

    def _drop_unfetched(self) -> bool:
        """Drop the KV of the latest request that waits for room elsewhere; return False if none
        does.

        The instance that would have fetched the KV recomputes it.
        """
        system_speaks_again = self.system.tick_interval is not None or self._more_to_come
        if system_speaks_again and any(
            request.paused for request in self.assignments.live.values()
        ):
            return False
        for request in reversed(self.assignments.live.values()):
            if request.exported and (request.legs or not system_speaks_again):
                self.assignments.hand_offs.release_export(request)
                if request.legs:
                    here = self.assignments.instances[request.legs[0].instance]
                    here.waiting.void_kv(request)
                    self.assignments.changed[here.name] = None
                else:
                    request.void_kv()
                return True
        return False

    def _explain_stall(self) -> str:
        live, unrouted = self.assignments.live, self.assignments.unrouted
        waiting = not unrouted and not any(request.paused for request in live.values())
        return (
            f"{type(self.system).__name__} has stalled: {len(live)} requests are left "
            f"({', '.join(list(live)[:5])}), {len(unrouted)} of them unrouted, and nothing is in "
            f"flight{': the policies of their instances take none of them' if waiting else ''}"
        )
