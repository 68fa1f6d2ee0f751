"""Finds steps that exceed the range in which step times were measured."""

from collections.abc import Mapping

from jaxinfer.serving.batch import Work
from jaxinfer.serving.world import StepDone
from jaxinfer.simulate.cluster import ModelledInstance

# The sizes of a step, by the names in a stage's ``measured``, which has the measured ranges.
_NAMES = ("tokens", "prompt tokens", "decodes", "entries per decode")


class BeyondMeasured:
    """Tracks the largest steps of a run.

    Args:
        instances: instances by name; those whose costs come from formulas are ignored.
    """

    def __init__(self, instances: Mapping[str, ModelledInstance]) -> None:
        self._measured = {name: each.measured for name, each in instances.items() if each.measured}
        self._most: dict[str, tuple[float, ...]] = dict.fromkeys(self._measured, (0.0,) * 4)

    def add_step(self, done: StepDone) -> None:
        """Record a step that has ended."""
        name = done.batch.instance
        if name in self._most:
            self._most[name] = tuple(map(max, self._most[name], _held(done.batch.work)))

    def found(self) -> dict[str, dict[str, tuple[float, float]]]:
        """Return, by instance and quantity, the largest value and the measured one it exceeds."""
        found: dict[str, dict[str, tuple[float, float]]] = {}
        for name, most in self._most.items():
            for what, had in zip(_NAMES, most, strict=True):
                last = self._measured[name].get(what)
                if last is not None and had > last:
                    found.setdefault(name, {})[what] = round(had), last
        return found


def _held(work: Work) -> tuple[float, ...]:
    rows = work.singles
    context = work.single_context / rows if rows else 0.0
    return work.tokens, work.tokens - rows, rows, context
