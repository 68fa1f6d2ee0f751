"""The FFN of a stage's layers, which this process computes for a stage in another process."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxinfer.checkpoints.open_tensors import Checkpoint
from jaxinfer.runtime.ffn.ffn_messages import ComputeFfn
from jaxinfer.runtime.ffn.ffn_step import compile_ffn, ffn_leaves
from jaxinfer.runtime.spread.lender import Lender
from jaxinfer.runtime.spread.lender_client import padded
from jaxinfer.runtime.stage.ffn_plan import plan_ffn
from jaxinfer.runtime.stage.load_weights import load_parameters
from jaxinfer.runtime.stage.stage_plan import StageFacts, StagePlan
from jaxinfer.runtime.stage.step import Parameters
from jaxinfer.runtime.stage.taken import TakenMemory


class FfnServer(Lender):
    """Computes the FFN for the stage's process.

    Args:
        plan: plan of the FFN.
        host: address of this process.
    """

    part = "FFN"

    def __init__(self, plan: StagePlan, parameters: Parameters, host: str) -> None:
        super().__init__(host)
        self.plan = plan
        _, self._layers = ffn_leaves(plan, parameters)
        self._runs: dict[int, jax.stages.Compiled] = {}

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, stage: StageFacts, devices: Sequence[jax.Device], host: str
    ) -> "FfnServer":
        """Plan the FFN of a stage and load its weights, and no others.

        Args:
            stage: plan of the stage.
            devices: devices of the FFN group.

        Raises:
            JaxinferError: see ``plan_ffn`` and ``load_parameters``.
        """
        plan = plan_ffn(stage, checkpoint.config, devices, TakenMemory())
        (parameters,) = load_parameters(checkpoint, [plan])
        return cls(plan, parameters, host)

    def compile_ahead(self) -> Iterator[int]:
        """See Lender."""
        buckets = dict.fromkeys(shape.tokens for shape in self.plan.limits.shapes())
        nothing_TD = np.zeros((0, self.plan.config.hidden_size), self.plan.dtype)
        for left, tokens in zip(range(len(buckets), 0, -1), buckets, strict=True):
            yield left
            self._runs[tokens] = compile_ffn(self.plan, tokens)
            self._do(ComputeFfn(0, tokens, nothing_TD))
        self.open()
        yield 0

    def _do(self, message: Any) -> Any:
        match message:
            case ComputeFfn(layer, tokens, x_TD):
                there_TD = jax.device_put(padded(x_TD, tokens), self.plan.whole)
                y_TD = self._runs[tokens](self._layers[layer], there_TD)
                return np.asarray(y_TD)[: len(x_TD)]
        raise AssertionError(message)
