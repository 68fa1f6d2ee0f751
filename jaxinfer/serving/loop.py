"""The serving loop: one loop for every system and both worlds."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from jaxinfer.config.validation import did_you_mean
from jaxinfer.errors import JaxinferError
from jaxinfer.request import FinishReason
from jaxinfer.serving.answers import check_legs, listed
from jaxinfer.serving.hooks import Hooks
from jaxinfer.serving.instance import Instance
from jaxinfer.serving.loss import Alive, LostInstance, detach
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.system import (
    Action,
    Assignment,
    ClusterView,
    Leg,
    MoveSlices,
    Pause,
    Reassign,
    Resume,
    SetRole,
    System,
)
from jaxinfer.serving.transfer import HandOffs
from jaxinfer.serving.world import Arrival, Event, InstanceLost, StepDone, Tick, TransferDone, World

Stop = tuple[FinishReason, int | str | None]
# After so many ticks in a row that change nothing, a system has stalled.
MAX_IDLE_TICKS = 100_000


class ServingLoop:
    """Takes requests from arrival to their end over the instances of one system.

    Args:
        world: supplies time and execution.
        instances: all of them, with unique names.
        system: decides where each request runs.
        check_stop: called with each token that has reached the host; a reason ends the request.
            Without, only ``max_tokens`` does.
        on_finish: called once per request: ``finish_reason`` is set, and ``error`` for one that
            could never fit, or that a lost instance had and no other takes.
        on_event: called with each StepDone, TransferDone and InstanceLost once it is committed.
        predict: called with each request that comes in: its ``predicted``.
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
    ) -> None:
        self.world = world
        self.instances: dict[str, Instance] = {i.name: i for i in instances}
        self.lost: dict[str, str] = {}
        self.system = system
        self.hand_offs = HandOffs(world, self.instances)
        self.unrouted: dict[str, RequestState] = {}
        self.live: dict[str, RequestState] = {}
        self._check_stop = check_stop
        self._on_finish = on_finish
        self._on_event = on_event
        self._predict = predict
        # Instances whose state has changed since they were last asked for a batch.
        self._changed: dict[str, None] = {}
        self._draining: dict[str, None] = {}
        self._steps_in_flight = 0
        self._sends_along = False
        self._hooks = Hooks(system, self._view)
        for instance in self.instances.values():
            instance.kv.on_free = partial(self._mark_changed, instance.name)

    def run(self) -> None:
        """Serve until all requests have come in and ended, and nothing is in flight."""
        for _ in self.rounds():
            pass

    def rounds(self) -> Iterator[None]:
        """As ``run``, with a stop after each round: of events, and what is launched upon them."""
        self._ask_for_tick()
        idle_ticks = 0
        while True:
            events = self.world.due_events()
            for event in events:
                self._apply(event)
            if self.system.tick_interval is not None and any(isinstance(e, Tick) for e in events):
                self._ask_for_tick()  # Only now is it known whether anything is left.
            self._decide()
            # With nothing in flight, nothing changes by itself.
            while not self._in_flight and (self._take_roles() or self._drop_unfetched()):
                self._decide()
            if not self._in_flight and not self.world.arrivals_left():
                if self.live and self.lost:
                    self._give_up()
                    if self._in_flight or self.world.arrivals_left():
                        continue
                if not self.live:
                    return
                idle_ticks += 1
                if self.system.tick_interval is None or idle_ticks > MAX_IDLE_TICKS:
                    raise JaxinferError(self._explain_stall())
            else:
                idle_ticks = 0
            yield

    def _ask_for_tick(self) -> None:
        interval = self.system.tick_interval
        if interval is not None and (self.live or self.world.arrivals_left()):
            self.world.wake_at(self.world.now() + interval)

    def _decide(self) -> None:
        self._take_roles()  # Before routing, which may go by role.
        if self.unrouted:
            self._route()
        self._launch()

    def _take_roles(self) -> bool:
        if not self._draining:
            return False
        now, instances = self.world.now(), self.instances
        taken = [name for name in self._draining if instances[name].take_role_when_drained(now)]
        for name in taken:
            del self._draining[name]
        return bool(taken)

    def _mark_changed(self, name: str) -> None:
        self._changed[name] = None

    @property
    def _in_flight(self) -> int:
        return self._steps_in_flight + len(self.hand_offs.moving)

    def _view(self) -> ClusterView:
        return ClusterView(self.world.now(), Alive(self.instances, self.lost))

    # Events: the only places where time moves a request on.

    def _apply(self, event: Event) -> None:
        match event:
            case StepDone():
                self._commit_step(event)
                self._on_event(event)
                if self._hooks.steps:
                    self._act("on_step", lambda: self.system.on_step(event, self._view()))
            case TransferDone():
                self._commit_transfer(event)
                self._on_event(event)
            case Arrival():
                if event.request.id in self.live:
                    raise ValueError(f"two requests at once have the id {event.request.id!r}")
                if self._predict:
                    event.request.predicted = self._predict(event.request)
                self.live[event.request.id] = event.request
                self.unrouted[event.request.id] = event.request
            case Tick():
                self._act("on_tick", lambda: self.system.on_tick(self._view()))
            case InstanceLost():
                self._lose(event)
                self._on_event(event)

    def _commit_step(self, done: StepDone) -> None:
        instance = self.instances[done.batch.instance]
        instance.in_flight -= 1
        self._steps_in_flight -= 1
        self._changed[instance.name] = None
        # Names for what is the same for all rows: this loop is most of a simulation's time.
        caches, check_stop = instance.kv.cache is not None, self._check_stop
        logprobs, details, prompt_details = done.logprobs, done.details, done.prompt_details
        end, sample = done.end, -1
        rows = done.batch.rows
        if done.batch.grouped:
            ended, left = instance.taking_part.commit_group(end)
            for request in ended:
                at_limit = len(request.output_token_ids) >= request.max_tokens
                self._finish(request, "length" if at_limit else "stop", None)
            rows = left + rows
        for row in rows:
            request, hold = row.request, row.hold
            hold.users -= 1
            if hold.released:
                hold.free_if_unused()
            sample += row.samples
            if row.epoch != request.epoch:
                continue  # Preempted, or stopped before this row's input was known.
            request.computed = row.start + row.count
            if caches:
                instance.keep_prefix(request)
            if prompt_details and request.id in prompt_details:
                request.prompt_details.update(prompt_details[request.id])
            metrics = request.metrics
            if metrics.first_scheduled is None:
                metrics.first_scheduled = done.start
            if row.samples:
                request.pending -= 1
                if logprobs:
                    request.cumulative_logprob += logprobs[sample]
                if details:
                    request.details.append(details[sample])
                token, tokens = done.tokens[sample], request.output_token_ids
                tokens.append(token)
                metrics.token_times.append(end)
                stop = check_stop(request, token) if check_stop else None
                if stop is None and len(tokens) >= request.max_tokens:
                    stop = ("length", None)
                if stop:
                    self._finish(request, *stop)
                    continue
            if request.slice_move or request.legs[0].until is not None:
                self._after_step(request)

    def _after_step(self, request: RequestState) -> None:
        if request.legs[0].until is not None:
            if request.leg_is_over:
                self._end_leg(request)
                return
            self.hand_offs.send_chunk(request)
        if request.slice_move:
            self.hand_offs.start_slice_move(request)

    def _commit_transfer(self, done: TransferDone) -> None:
        transfer, request = done.transfer, done.transfer.request
        self.hand_offs.done(transfer, done.end)
        self._changed[transfer.source] = self._changed[transfer.dest] = None
        if self._runs(request) and request.leg_is_over and not request.slice_move:
            self._end_leg(request)  # Cut short while its KV was on the way.

    def _runs(self, request: RequestState) -> bool:
        return (
            bool(request.legs) and request in self.instances[request.legs[0].instance].taking_part
        )

    def _end_leg(self, request: RequestState) -> None:
        leg = request.legs[0]
        self.hand_offs.end_leg(request)
        if request.legs:
            self._changed[request.legs[0].instance] = None
        else:
            self.unrouted[request.id] = request
        if self._hooks.leg_ends:
            self._hooks.leg_ended(request, leg)

    def _finish(
        self, request: RequestState, reason: FinishReason, detail: int | str | None
    ) -> None:
        if request.legs:
            self.instances[request.legs[0].instance].remove(request)
        request.finish_reason, request.stop_reason = reason, detail
        self.hand_offs.release_export(request)
        if request.hold:
            request.hold.release()
            request.hold = None
        request.void_kv()
        request.legs.clear()
        self.unrouted.pop(request.id, None)
        del self.live[request.id]
        if self._hooks.finishes:
            self._hooks.finished(request)
        self._on_finish(request)

    def _lose(self, event: InstanceLost) -> None:
        lost = self.instances[event.instance]
        self.lost[lost.name] = event.reason
        self._steps_in_flight -= lost.in_flight
        adrift = detach(lost, self.instances, self.live.values(), self.hand_offs)
        del self.instances[lost.name]
        self._draining.pop(lost.name, None)
        self._changed = dict.fromkeys(self.instances)
        self.unrouted = {request.id: request for request in adrift} | self.unrouted

    def _give_up(self) -> None:
        """After a loss the system has stalled: fail what it does not route, or else all."""
        lost = next(reversed(self.lost))
        self._fail_all(self.unrouted.values(), lost)
        self._decide()
        if not self._in_flight:
            self._fail_all(self.live.values(), lost)

    def _fail_all(self, requests: Iterable[RequestState], lost: str) -> None:
        for request in list(requests):
            request.error = (
                f"request {request.id!r}: instance {lost!r} was lost, and the system has no other "
                f"for it: {self.lost[lost]}"
            )
            self._finish(request, "lost", None)

    # Decisions: routing, actions, launches.

    def _route(self) -> None:
        if not self.instances:
            self._fail_all(self.unrouted.values(), next(reversed(self.lost)))
            return
        try:
            answer = self.system.route(self.unrouted.values(), self._view())
            assignments = listed(self.system, "route", answer)
        except LostInstance as error:
            self._fail_all(self.unrouted.values(), error.args[0])
            return
        for assignment in assignments:
            try:
                self._assign(assignment)
            except LostInstance as error:
                self._fail_all([self.unrouted[assignment.request]], error.args[0])

    def _assign(self, assignment: Assignment) -> None:
        request = self.unrouted.get(assignment.request)
        if request is None:
            raise JaxinferError(f"system routes {assignment.request!r}, which does not wait")
        check_legs(request.id, assignment.legs)
        legs = self._legs_beyond(request.computed, assignment.legs)
        if not legs:
            raise JaxinferError(f"system gives {request.id!r} no leg past {request.computed}")
        if refusal := self._refusal(request, legs):
            request.error = refusal
            self._finish(request, "error", None)
            return
        del self.unrouted[request.id]
        request.legs = legs
        self.hand_offs.start_leg(request)
        self._changed[legs[0].instance] = None

    def _instance(self, name: str) -> Instance:
        if name in self.lost:
            raise LostInstance(name)
        if name not in self.instances:
            known = did_you_mean(name, self.instances)
            raise JaxinferError(f"system names instance {name!r}: {known}")
        return self.instances[name]

    def _legs_beyond(self, reached: int, legs: Sequence[Leg]) -> list[Leg]:
        """``legs`` less the empty ones, where ``reached`` KV entries are there already."""
        left: list[Leg] = []
        for leg in legs:
            self._instance(leg.instance)
            self._sends_along |= leg.hand_off == "per_segment"
            if leg.until is not None and leg.until <= reached:
                continue
            if not left or left[-1].until is not None:
                left.append(leg)
            reached = leg.until or reached
        return left

    def _refusal(self, request: RequestState, legs: Sequence[Leg]) -> str | None:
        """Why no pool could ever hold the request, with the numbers."""
        reasons = (self.instances[leg.instance].never_holds(request, leg) for leg in legs)
        return next((reason for reason in reasons if reason), None)

    def _act(self, hook: str, ask: Callable[[], Iterable[Action]]) -> None:
        try:
            # Mostly there are none, and this is done at each step.
            if self.instances and (answer := ask()) != ():
                for action in listed(self.system, hook, answer):
                    self._do(action)
        except LostInstance:
            pass  # The system had something in mind for an instance that is no more.

    def _do(self, action: Action) -> None:
        if isinstance(action, SetRole):
            self._instance(action.instance).next_role = action.role
            self._draining[action.instance] = None
            return
        request = self.live.get(action.request)
        if request is None:
            return  # It ended in the step that the system answers.
        if request.legs:
            self.instances[request.legs[0].instance].taking_part.leave_group(request)
        match action:
            case Pause():
                request.paused = True
            case Resume():
                request.paused = False
            case Reassign():
                check_legs(request.id, action.legs)
                self._reassign(request, action.legs)
            case MoveSlices() if self._runs(request) and not request.slice_move:
                self.hand_offs.ask_slice_move(request, action)
            case _:
                return
        if request.legs:
            self._changed[request.legs[0].instance] = None

    def _reassign(self, request: RequestState, legs: Sequence[Leg]) -> None:
        if request.legs:
            here = self.instances[request.legs[0].instance]
            self._changed[here.name] = None
            if request in here.taking_part or request.id in here.importing:
                self._revise_legs(request, here, legs)
                return
            here.waiting.remove(request)
            request.legs = []
            self.unrouted[request.id] = request
        if legs:
            self._assign(Assignment(request.id, tuple(legs)))

    def _revise_legs(self, request: RequestState, here: Instance, legs: Sequence[Leg]) -> None:
        """Other legs for a request that runs or is being imported."""
        following = self._legs_beyond(request.launched, legs)
        if refusal := self._refusal(request, following):
            request.error = refusal
            self._finish(request, "error", None)
            return
        if not following or following[0].instance != here.name:
            # KV entries in flight are still computed here; the rest is the next leg's.
            following.insert(0, Leg(here.name, request.launched))
        request.legs = following
        next_kv = self.instances[following[1].instance].kv if len(following) > 1 else None
        if request.incoming and request.incoming.kv is not next_kv:
            request.drop_incoming()
        in_motion = request.id in here.importing or request.slice_move
        if request.leg_is_over and not in_motion:
            self._end_leg(request)

    def _launch(self) -> None:
        while self._changed:
            changed, self._changed = self._changed, {}
            for name in changed:
                instance = self.instances[name]
                while batch := instance.form_batch():
                    self._steps_in_flight += 1
                    if self._sends_along:
                        self.hand_offs.send_along(batch)
                    self.world.launch(batch)
                for request in instance.take_admitted_imports():
                    self.hand_offs.pull(request)

    def _drop_unfetched(self) -> bool:
        """Drop the KV of the latest request that waits for room elsewhere, if there is one.

        It is recomputed by the instance that was to fetch it.
        """
        system_speaks_again = self.system.tick_interval is not None or self.world.arrivals_left()
        if system_speaks_again and any(request.paused for request in self.live.values()):
            return False
        for request in reversed(self.live.values()):
            if request.exported and (request.legs or not system_speaks_again):
                self.hand_offs.release_export(request)
                if request.legs:
                    here = self.instances[request.legs[0].instance]
                    here.waiting.void_kv(request)
                    self._changed[here.name] = None
                else:
                    request.void_kv()
                return True
        return False

    def _explain_stall(self) -> str:
        names = ", ".join(list(self.live)[:5])
        return (
            f"{type(self.system).__name__} has stalled: {len(self.live)} requests are left "
            f"({names}), {len(self.unrouted)} of them unrouted, and nothing is in flight"
        )
