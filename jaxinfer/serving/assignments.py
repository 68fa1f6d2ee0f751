"""Carries out the system's routes and actions."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial

from jaxinfer.errors import JaxinferError
from jaxinfer.options.validation import did_you_mean
from jaxinfer.request import FinishReason
from jaxinfer.serving.features.losses import AliveInstances, Loss, Losses, LostInstance
from jaxinfer.serving.hooks import Hooks, check_budget, check_hand_off, check_legs
from jaxinfer.serving.instance import Instance
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.system import (
    Action,
    Assignment,
    Budget,
    MoveSlices,
    Pause,
    Reassign,
    Resume,
    SetRole,
)
from jaxinfer.serving.transfer import HandOffs
from jaxinfer.serving.views import ClusterView, Leg
from jaxinfer.serving.world import GoesWithout, InstanceBack, InstanceLost, World


class Assignments:
    """All live requests with their remaining legs, and the instances that serve them.

    Args:
        hooks: the system's hooks.
        on_leg_end: called with each request whose leg has ended, and that leg.
        on_finish: called once per request that has ended.
        renew: makes a fresh instance to replace a returning one, from its name.

    Attributes:
        instances: instances that are not lost.
        losses: lost instances, including those that will return.
        live: unfinished requests that have arrived, by id, in the order of arrival.
        unrouted: requests that the system has yet to route.
        changed: instances whose state has changed since their last batch was requested.
        sends_along: whether some leg requires its KV to be sent while it is computed.
        sends: whether KV may have been sent from one instance to another.
        on_legs: called with a request that has new legs.
        on_preempt: called with an instance's name and a request that will lose its pages there.
        on_role: called with an instance's name and its new role.
    """

    def __init__(
        self,
        world: World,
        instances: Iterable[Instance],
        hooks: Hooks,
        on_leg_end: Callable[[RequestState, Leg], None],
        on_finish: Callable[[RequestState], None],
        renew: Callable[[str], Instance] | None = None,
    ) -> None:
        self.instances: dict[str, Instance] = {i.name: i for i in instances}
        self.live: dict[str, RequestState] = {}
        self.unrouted: dict[str, RequestState] = {}
        self.changed: dict[str, None] = {}
        self.sends_along = False
        self.sends = any(instance.options.tier for instance in self.instances.values())
        self.on_legs: Callable[[RequestState], None] = lambda request: None
        self.on_preempt: Callable[[str, RequestState], None] = lambda name, request: None
        self.on_role: Callable[[str, str], None] = lambda name, role: None
        self.hand_offs = HandOffs(world, self.instances)
        self.losses = Losses(self.instances, self.hand_offs, self._finish_lost, renew)
        self._world = world
        self._hooks, self._system = hooks, hooks.name
        self._on_leg_end, self._on_finish = on_leg_end, on_finish
        self._draining: dict[str, None] = {}
        # The systems' view of the instances; it is renewed when an instance or shard is lost or
        # returns.
        self._there: AliveInstances | None = None
        self._view: ClusterView | None = None
        for instance in self.instances.values():
            self._watch(instance)

    def _watch(self, instance: Instance) -> None:
        instance.kv.on_free = partial(self._mark_changed, instance.name)
        instance.on_preempt = lambda request: self.on_preempt(instance.name, request)
        if instance.options.tier:
            instance.has_more = partial(self._has_more, instance.options.tier)
            instance.fetch = partial(self._fetch, instance.options.tier)
        if self._hooks.places:
            instance.place = lambda request: self._hooks.place(request, instance)
        if self._hooks.makes_room:
            instance.make_room = partial(self._make_room, instance)

    def _make_room(self, instance: Instance, request: RequestState, shard: int) -> None:
        """Let the system move slices out of a shard while a batch is formed."""
        self.act(lambda: self._hooks.make_room(request, shard, instance))

    def _has_more(self, tier: str, request: RequestState) -> bool:
        """Tell whether a tier, if it is not lost, has KV that a request's own instance lacks."""
        return tier in self.instances and self.hand_offs.has_more(request, self.instances[tier])

    def _fetch(self, tier: str, request: RequestState) -> None:
        self.hand_offs.fetch_cached(request, self.instances[tier])

    def _mark_changed(self, name: str) -> None:
        self.changed[name] = None

    def take_changed(self) -> Iterable[str]:
        """Return the names of the instances that have changed since the last call."""
        changed, self.changed = self.changed, {}
        return changed

    def view(self) -> ClusterView:
        """Return the cluster as the system sees it now."""
        if self._there is None:
            there = {name: each for name, each in self.instances.items() if each.options.computes}
            self._there, self._view = AliveInstances(there, self.losses.lost), None
        now = self._world.now()
        if self._view is None or self._view.now != now:
            self._view = ClusterView(now, self._there, self._world.kv_token_s)
        return self._view

    def add(self, request: RequestState) -> None:
        """Register a request that has arrived."""
        if request.id in self.live:
            raise ValueError(f"two requests at once have the id {request.id!r}")
        self.live[request.id] = request
        self.unrouted[request.id] = request

    def _finish_lost(self, request: RequestState) -> None:
        self.finish(request, "lost", None)

    def runs(self, request: RequestState) -> bool:
        """Tell whether a request takes part in its instance's steps."""
        legs = request.legs
        return bool(legs) and request in self.instances[legs[0].instance].taking_part

    def end_leg(self, request: RequestState) -> None:
        """Move the request on to its next leg, or back to the system if none is left."""
        leg = request.legs[0]
        self.hand_offs.end_leg(request)
        if request.legs:
            self.changed[request.legs[0].instance] = None
        else:
            self.unrouted[request.id] = request
        self._on_leg_end(request, leg)

    def finish(self, request: RequestState, reason: FinishReason, detail: int | str | None) -> None:
        """End the request and release everything that instances hold of it."""
        here = self.instances[request.legs[0].instance] if request.legs else None
        if here:
            here.remove(request)
            tier = self.instances.get(here.options.tier_of(request) or "")
            if tier and request.hold and reason in ("stop", "length"):
                self.hand_offs.copy_out(request, here, tier)
        request.finish_reason, request.stop_reason = reason, detail
        if reason == "error" and request.hold:
            for instance in self.instances.values():
                instance.forget_prefix(request)  # Its entries may hold NaN.
        self.hand_offs.release_export(request)
        if request.hold:
            request.hold.release()
            request.hold = None
        request.void_kv()
        request.legs.clear()
        self.unrouted.pop(request.id, None)
        del self.live[request.id]
        self._on_finish(request)

    def apply_loss(self, event: Loss) -> int:
        """Apply a loss or a return; requests of a lost instance are routed again before all others.

        Returns:
            The number of steps in flight that are lost.
        """
        steps, name = 0, event.instance
        self._there = None
        match event:
            case InstanceLost():
                lost = self.instances.get(name)
                adrift = self.losses.lose(event, self.live.values())
                if lost:
                    steps = lost.in_flight
                    self._draining.pop(name, None)
                    self.changed = dict.fromkeys(self.instances)
                    waiting = self.unrouted.copy()
                    self.unrouted.clear()
                    self.unrouted.update({request.id: request for request in adrift} | waiting)
            case InstanceBack():
                self._watch(self.losses.take_back(event))
            case GoesWithout():
                self.losses.go_without(event)
                self.changed[name] = None
        return steps

    def route(self, ask: Callable[[], Iterable[Assignment]]) -> None:
        """Ask the system where to send unrouted requests, and send them there.

        If the system chooses a lost instance, the request fails, or waits while an instance
        returns.
        """
        losses, lost = self.losses, self.losses.lost
        if not self.view().instances:
            losses.fail_unless_returning(self.unrouted.values(), next(reversed(lost)))
            return
        try:
            assignments = ask()
        except LostInstance as error:
            losses.fail_unless_returning(self.unrouted.values(), error.args[0])
            return
        for assignment in assignments:
            try:
                self._assign(assignment)
            except LostInstance as error:
                losses.fail_unless_returning([self.unrouted[assignment.request]], error.args[0])

    def _assign(self, assignment: Assignment) -> None:
        request = self.unrouted.get(assignment.request)
        if request is None:
            raise JaxinferError(
                f"{self._system} routes {assignment.request!r}, which does not wait"
            )
        check_legs(self._system, request.id, assignment.legs)
        legs = self._legs_beyond(request.computed, assignment.legs)
        if not legs:
            raise JaxinferError(
                f"{self._system} gives {request.id!r} no leg past {request.computed}"
            )
        if refusal := self._refusal(request, legs):
            if self.losses.regaining & {leg.instance for leg in legs}:
                return  # There may be room now.
            request.error = refusal
            self.finish(request, "error", None)
            return
        del self.unrouted[request.id]
        request.legs = legs
        self.on_legs(request)
        if assignment.fetch_from:
            self.sends = True
            with suppress(LostInstance):
                source = self._instance(assignment.fetch_from)
                if self.hand_offs.has_more(request, source):
                    self.hand_offs.fetch_cached(request, source)
        self.hand_offs.start_leg(request)
        self.changed[legs[0].instance] = None

    def _instance(self, name: str) -> Instance:
        if name in self.losses.lost:
            raise LostInstance(name)
        if name not in self.instances:
            known = did_you_mean(name, self.instances)
            raise JaxinferError(f"{self._system} names instance {name!r}: {known}")
        return self.instances[name]

    def _legs_beyond(self, reached: int, legs: Sequence[Leg]) -> list[Leg]:
        """Return ``legs`` without those that end within the ``reached`` existing KV entries."""
        left: list[Leg] = []
        for leg in legs:
            self._instance(leg.instance)
            self.sends_along |= leg.hand_off == "per_segment"
            self.sends |= leg.until is not None
            if leg.until is not None and leg.until <= reached:
                continue
            if not left or left[-1].until is not None:
                left.append(leg)
            reached = leg.until or reached
        return left

    def _refusal(self, request: RequestState, legs: Sequence[Leg]) -> str | None:
        """Say why a leg's pool could never hold the request, with the numbers; None if all can."""
        reasons = (self.instances[leg.instance].never_holds(request, leg) for leg in legs)
        return next((reason for reason in reasons if reason), None)

    def act(self, ask: Callable[[], Iterable[Action]]) -> None:
        """Carry out the system's actions, except those for a lost instance."""
        with suppress(LostInstance):  # The system asked for one while it decided.
            for action in ask() if self.view().instances else ():
                with suppress(LostInstance):
                    self._do(action)

    def _do(self, action: Action) -> None:
        if isinstance(action, SetRole):
            self._instance(action.instance).next_role = action.role
            self._draining[action.instance] = None
            return
        if isinstance(action, Budget):
            check_budget(self._system, action)
            self._instance(action.instance).prompt_budget = action.prompt_tokens
            self.changed[action.instance] = None
            return
        request = self.live.get(action.request)
        if request is None:
            return  # It ended in the step that the system reacts to.
        if request.legs:
            self.instances[request.legs[0].instance].taking_part.leave_group(request)
        match action:
            case Pause():
                request.paused = True
            case Resume():
                request.paused = False
            case Reassign():
                check_legs(self._system, request.id, action.legs)
                check_hand_off(self._system, request.id, action.hand_off)
                self._reassign(request, action)
            case MoveSlices() if self.runs(request):
                self.hand_offs.slices.ask(request, action)
            case _:
                return
        if request.legs:
            self.changed[request.legs[0].instance] = None

    def _reassign(self, request: RequestState, action: Reassign) -> None:
        if request.legs:
            here = self.instances[request.legs[0].instance]
            self.changed[here.name] = None
            if request in here.taking_part or request.id in here.importing:
                self._revise_legs(request, here, action)
                return
            here.remove(request)
            self.hand_offs.leave_tier(request)
            request.legs = []
            self.unrouted[request.id] = request
        if action.legs:
            self._assign(Assignment(request.id, tuple(action.legs)))

    def _revise_legs(self, request: RequestState, here: Instance, action: Reassign) -> None:
        """Replace the legs of a request that runs or is being imported."""
        self.sends_along |= action.hand_off == "per_segment"
        following = self._legs_beyond(request.launched, action.legs)
        if refusal := self._refusal(request, following):
            request.error = refusal
            self.finish(request, "error", None)
            return
        if not following or following[0].instance != here.name:
            # KV entries in flight are computed by this leg; the next leg computes the rest.
            following.insert(0, Leg(here.name, request.launched, action.hand_off))
        request.legs = following
        self.on_legs(request)
        next_kv = self.instances[following[1].instance].kv if len(following) > 1 else None
        if request.incoming and request.incoming.kv is not next_kv:
            request.drop_incoming()
        in_motion = request.id in here.importing or request.slice_move
        if request.leg_is_over and not in_motion:
            self.end_leg(request)

    def take_roles(self) -> bool:
        """Give drained instances their next role; return True if any took one."""
        if not self._draining:
            return False
        now, instances = self._world.now(), self.instances
        taken = [name for name in self._draining if instances[name].take_role_when_drained(now)]
        for name in taken:
            del self._draining[name]
            self.on_role(name, instances[name].role)
        return bool(taken)
