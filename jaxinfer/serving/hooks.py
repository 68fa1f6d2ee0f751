"""Calls a system's hooks, and reports invalid answers in one line."""

from collections.abc import Callable, Collection, Iterable, Sequence
from numbers import Integral
from typing import Any, TypeVar, get_args

from jaxinfer.errors import FAILURES, JaxinferError, raised
from jaxinfer.options.validation import shown
from jaxinfer.serving.features.head_slices import Placement
from jaxinfer.serving.features.losses import LostInstance
from jaxinfer.serving.instance import Instance
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.system import Action, Assignment, Budget, MoveSlices, System
from jaxinfer.serving.views import ClusterView, HandOffRule, Leg
from jaxinfer.serving.world import StepDone

T = TypeVar("T")
_RULES = get_args(HandOffRule)
_WANTED: dict[str, tuple[str, Any]] = {
    "route": ("assignments", Assignment),
    "on_step": ("actions", Action),
    "on_tick": ("actions", Action),
    "make_room": ("MoveSlices", MoveSlices),
}


class Hooks:
    """Calls those hooks that a system defines; undefined hooks cost nothing.

    Attributes:
        name: name of the system.
        steps: whether the system defines ``on_step``.
        leg_ends: whether it defines ``on_leg_end``.
        finishes: whether it defines ``on_finish``.
        places: whether it defines ``place``.
        makes_room: whether it defines ``make_room``.
        only_routes: whether it decides nothing except where waiting requests go.
    """

    def __init__(self, system: System) -> None:
        kind = type(system)
        self._system, self.name = system, kind.__name__
        self.places = kind.place is not System.place
        self.makes_room = kind.make_room is not System.make_room
        self.steps = kind.on_step is not System.on_step
        self.leg_ends = kind.on_leg_end is not System.on_leg_end
        self.finishes = kind.on_finish is not System.on_finish
        hears = self.steps or self.leg_ends or self.finishes or self.places or self.makes_room
        self.only_routes = not hears and system.tick_interval is None

    def route(self, unrouted: Collection[RequestState], view: ClusterView) -> Iterable[Assignment]:
        """Ask where to send requests."""
        return self._asked("route", lambda: self._system.route(unrouted, view))

    def place(self, request: RequestState, instance: Instance) -> Placement | None:
        """Ask where to place a request's slices."""
        return self._call("place", lambda: self._place(request, instance))

    def _place(self, request: RequestState, instance: Instance) -> Placement | None:
        answer = self._system.place(request, instance)
        if answer is not None and not instance.kv.is_placement(answer):
            raise JaxinferError(
                f"{self.name}.place returns {shown(answer)} for {request.id!r}, must have each "
                f"slice once, in a shard of its stage: {instance.kv.describe_slices()}"
            )
        return answer

    def make_room(
        self, request: RequestState, shard: int, instance: Instance
    ) -> Iterable[MoveSlices]:
        """Ask for moves of slices out of a shard that has no room."""
        return self._asked("make_room", lambda: self._system.make_room(request, shard, instance))

    def step_ended(self, done: StepDone, view: ClusterView) -> Iterable[Action]:
        """Ask for actions after a step."""
        return self._asked("on_step", lambda: self._system.on_step(done, view))

    def ticked(self, view: ClusterView) -> Iterable[Action]:
        """Ask for actions at a tick."""
        return self._asked("on_tick", lambda: self._system.on_tick(view))

    def _asked(self, hook: str, ask: Callable[[], Iterable[T]]) -> Iterable[T]:
        answer = self._call(hook, ask)
        if isinstance(answer, tuple | list) and not answer:  # Usually, it is nothing.
            return ()
        return listed(self._system, hook, answer)

    def leg_ended(self, request: RequestState, leg: Leg, view: ClusterView) -> None:
        """Report that a leg has ended."""
        self._tell("on_leg_end", lambda: self._system.on_leg_end(request, leg, view))

    def finished(self, request: RequestState, view: ClusterView) -> None:
        """Report that a request has ended."""
        self._tell("on_finish", lambda: self._system.on_finish(request, view))

    def _call(self, hook: str, call: Callable[[], T]) -> T:
        """Call a hook; an exception becomes one line that names the hook."""
        try:
            return call()
        except (JaxinferError, LostInstance):
            raise
        except FAILURES as error:
            raise JaxinferError(f"{self.name}.{hook} raises {raised(error)}") from error

    def _tell(self, hook: str, call: Callable[[], object]) -> None:
        try:
            answer = self._call(hook, call)
        except LostInstance:
            return  # The system has looked for an instance that no longer exists.
        if answer is not None:
            raise JaxinferError(
                f"{self.name}.{hook} returns {shown(answer)}, must return "
                "nothing: actions are for on_step and on_tick"
            )


def listed(system: System, hook: str, answer: Iterable[Any]) -> list[Any]:
    """Return the answer of a system's hook as a list.

    Raises:
        JaxinferError: the answer is not iterable, or an item has another type.
    """
    what, kind = _WANTED[hook]
    items = list(answer) if isinstance(answer, Iterable) else None
    if items is None or not all(isinstance(item, kind) for item in items):
        raise JaxinferError(
            f"{type(system).__name__}.{hook} returns {str(answer)[:60]}, must be a sequence of "
            f"{what}"
        )
    return items


def check_budget(system: str, action: Budget) -> None:
    """Raise JaxinferError for a limit with which no prompt could continue."""
    limit = action.prompt_tokens
    if limit is not None and (not isinstance(limit, Integral) or limit < 1):
        raise JaxinferError(
            f"{system} gives {action.instance!r} a budget of {shown(limit)} prompt tokens, must be "
            "1 or more, or None"
        )


def check_hand_off(system: str, request: str, rule: str) -> None:
    """Raise JaxinferError for an unknown hand-off rule."""
    if rule not in _RULES:
        raise JaxinferError(
            f"{system} gives {request!r} a leg with hand_off {rule!r}, must be one of "
            f"{', '.join(_RULES)}"
        )


def check_legs(system: str, request: str, legs: Sequence[Leg]) -> None:
    """Raise JaxinferError for invalid legs."""
    if not isinstance(legs, tuple | list) or not all(isinstance(leg, Leg) for leg in legs):
        raise JaxinferError(f"{system} gives {request!r} the legs {legs!r}, must be a tuple of Leg")
    for leg in legs:
        if leg.until is not None and (not isinstance(leg.until, Integral) or leg.until < 0):
            raise JaxinferError(
                f"{system} gives {request!r} a leg on {leg.instance!r} until {leg.until!r}, "
                "must be a number of KV entries, or None for the request's end"
            )
        check_hand_off(system, request, leg.hand_off)
