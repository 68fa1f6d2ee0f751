"""What a system hears of requests, besides what it is asked."""

from collections.abc import Callable

from jaxinfer.config.validation import shown
from jaxinfer.errors import JaxinferError
from jaxinfer.serving.answers import asking
from jaxinfer.serving.loss import LostInstance
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.system import ClusterView, Leg, System


class Hooks:
    """Calls those hooks that a system defines; the others cost nothing.

    Args:
        view: makes what a hook sees.

    Attributes:
        steps, leg_ends, finishes: whether the system has a hook for them.
    """

    def __init__(self, system: System, view: Callable[[], ClusterView]) -> None:
        kind = type(system)
        self._system, self._view = system, view
        self.steps = kind.on_step is not System.on_step
        self.leg_ends = kind.on_leg_end is not System.on_leg_end
        self.finishes = kind.on_finish is not System.on_finish

    def leg_ended(self, request: RequestState, leg: Leg) -> None:
        """Tell of a leg that has ended."""
        self._tell("on_leg_end", lambda: self._system.on_leg_end(request, leg, self._view()))

    def finished(self, request: RequestState) -> None:
        """Tell of a request's end."""
        self._tell("on_finish", lambda: self._system.on_finish(request, self._view()))

    def _tell(self, hook: str, call: Callable[[], object]) -> None:
        try:
            with asking(self._system, hook):
                answer = call()
        except LostInstance:
            return  # The system has looked for an instance that is no more.
        if answer is not None:
            raise JaxinferError(
                f"{type(self._system).__name__}.{hook} returns {shown(answer)}, must return "
                "nothing: actions are for on_step and on_tick"
            )
