"""A stage of an instance that keeps pages for others and computes nothing."""

from collections.abc import Iterator

from flax import nnx

from jaxinfer.runtime.stage.sampler import SamplerShape
from jaxinfer.runtime.stage.stage import Stage
from jaxinfer.runtime.stage.stage_plan import StagePlan
from jaxinfer.runtime.stage.step import Parameters, StageLeaves


class KeepingStage(Stage):
    """A stage that only has pages: no parameters and no compiled steps."""

    def __init__(self, plan: StagePlan) -> None:
        super().__init__(plan, nnx.State({}))

    def _leaves_of(self, parameters: Parameters) -> StageLeaves:
        return StageLeaves((), ())

    def compile_ahead(self, sampler: SamplerShape) -> Iterator[int]:
        """Yield 0: this stage has no steps to compile."""
        yield 0
