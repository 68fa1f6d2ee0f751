"""Step times of a stage whose devices share each layer according to a sharding layout."""

from typing import Self

from jaxinfer.config.costs import SimulateOptions
from jaxinfer.config.stage_part import TABLE_SIZE, StagePart
from jaxinfer.serving.batch import Work
from jaxinfer.sharding.costs import LayoutCosts, Seconds
from jaxinfer.sharding.links import stated_links


class LayoutStage:
    """Step times of a pipeline stage under a layout, by roofline efficiencies and links.

    Args:
        layers: number of layers.
        last: whether the stage has the head.
        step_s: seconds added to each step.
        sequence_s: seconds added for each sequence.
    """

    def __init__(
        self,
        costs: LayoutCosts,
        layers: int,
        last: bool,
        step_s: float = 0.0,
        sequence_s: float = 0.0,
    ) -> None:
        self._costs, self._layers, self._last = costs, layers, last
        self._step_s, self._sequence_s = step_s, sequence_s

    @classmethod
    def of(cls, part: StagePart, costs: SimulateOptions) -> Self:
        """Make the stage from a run file's options, which must have no measured costs."""
        assert part.flow
        made = LayoutCosts(
            part.flow,
            part.gpu,
            stated_links(part.gpu, part.flow.mesh),
            costs.flops,
            costs.bandwidth,
            weight_size=part.mean_weight_size,
            kv_size=part.kv_size,
            table_size=TABLE_SIZE,
        )
        return cls(made, part.layers, part.last, costs.step_s, costs.sequence_s)

    def seconds(self, work: Work) -> float:
        """Return the seconds of one step."""
        return self.spent(work).total + self._step_s + self._sequence_s * work.sequences

    def spent(self, work: Work) -> Seconds:
        """Return the seconds of one step by cause, without the time that an engine adds.

        Prefill chunks and decodes are separate kernels.
        """
        costs = self._costs
        layer = costs.dense(work.tokens)
        if work.single_context:
            # The longest context is unknown, so sequences are assumed to be equal.
            context = work.single_context
            layer += costs.attention(context, context, context / work.singles)
        if work.chunks:
            seen = [start + count for start, count in work.chunks]
            layer += costs.attention(work.pairs, sum(seen), max(seen))
        seconds = layer * self._layers
        return seconds + costs.head(work.sampled) if self._last and work.sampled else seconds
