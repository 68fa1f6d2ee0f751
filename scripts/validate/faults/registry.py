"""Faults of hand-offs: movers with one wrong step, from a grammar of mistakes.

The grammar (``source_faults``, ``dest_faults``, ``delta_faults``) combines a step, an object and a
mistake. It is applied to each pair of layouts for which the result is a fault. The check does not
use the grammar.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxinfer.lab.conformance.check import Finding
from jaxinfer.lab.conformance.golden import GoldenModel
from jaxinfer.lab.conformance.layout import KVLayout
from jaxinfer.lab.conformance.mover import Mover
from scripts.validate.faults.delta_faults import delta_faults
from scripts.validate.faults.dest_faults import DEST_PRODUCTIONS
from scripts.validate.faults.mistake import Mistake
from scripts.validate.faults.scenario import PAIRS, Scenario, scenario
from scripts.validate.faults.source_faults import SOURCE_PRODUCTIONS


@dataclass(frozen=True)
class Fault:
    """A mistake in a hand-off between two layouts."""

    mistake: Mistake
    source: KVLayout
    dest: KVLayout
    model: GoldenModel

    @property
    def name(self) -> str:
        """The name that a check must give to it."""
        return self.mistake.name

    def __str__(self) -> str:
        return f"{self.source} to {self.dest}: {self.mistake.words}"

    def findings(self) -> list[Finding]:
        """Hand over with this fault, and check."""
        mistake = self.mistake
        case = scenario(self.source, self.dest, self.model, mistake.cached, mistake.before)
        return case.run(_Faulty(case, self.mistake))


class _Faulty(Mover):
    """A mover with some steps replaced."""

    def __init__(self, case: Scenario, mistake: Mistake) -> None:
        super().__init__(case.source, case.dest, case.cached)
        self._after = mistake.after
        for name, step in mistake.steps.items():
            setattr(self, name, step.__get__(self))  # Bound to the mover like a method.

    def finish(self) -> None:
        if self._after:
            self._after(self)


def all_faults(pairs: Sequence[tuple[KVLayout, KVLayout, GoldenModel]] = PAIRS) -> list[Fault]:
    """Return the faults of the grammar on each pair of layouts."""
    return [
        Fault(each, source, dest, model)
        for source, dest, model in pairs
        for production in (*SOURCE_PRODUCTIONS, *DEST_PRODUCTIONS, delta_faults)
        for each in production(source, dest, model)
    ]
