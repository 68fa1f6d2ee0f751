"""The run file's section ``simulate``: what the modelled cluster's numbers leave open."""

from typing import Literal

from pydantic import Field

from jaxinfer.validation import Options


class GroupCosts(Options):
    """Costs of one device group's steps, where they differ from the others'.

    Attributes:
        flops, bandwidth: what a kernel reaches of the GPU's peaks.
        step_s: seconds that the engine adds to each step; ``sequence_s``: for each sequence in it.
        reserve_gb: memory of each GPU for activations and all else that is neither weights nor KV,
            in 10^9 bytes; by default what the largest step's hidden states and logits take.
        tables: a folder with measured operators (see ``tables.py``), in place of ``flops`` and
            ``bandwidth``.
    """

    flops: float | None = Field(default=None, gt=0, le=1)
    bandwidth: float | None = Field(default=None, gt=0, le=1)
    step_s: float | None = Field(default=None, ge=0)
    sequence_s: float | None = Field(default=None, ge=0)
    reserve_gb: float | None = Field(default=None, ge=0)
    tables: str | None = None


class SimulateOptions(Options):
    """Costs of all groups.

    Attributes:
        flops, bandwidth, step_s, sequence_s, reserve_gb, tables: see ``GroupCosts``.
        hop_s: seconds that a stage is busy with sending hidden states on, beside the link's time.
        fit: what of the Balancer's predictors (Cronus eqs. 2 and 3) has the least squares: their
            ``relative`` error, as in our profiles, or the ``absolute`` one, as in the paper.
        groups: by group, what differs.
    """

    flops: float = Field(default=0.6, gt=0, le=1)
    bandwidth: float = Field(default=0.7, gt=0, le=1)
    step_s: float = Field(default=0.0, ge=0)
    sequence_s: float = Field(default=0.0, ge=0)
    hop_s: float = Field(default=0.0, ge=0)
    fit: Literal["relative", "absolute"] = "relative"
    reserve_gb: float | None = Field(default=None, ge=0)
    tables: str | None = None
    groups: dict[str, GroupCosts] = Field(default_factory=dict)

    def of(self, group: str) -> "SimulateOptions":
        """What holds for one group."""
        own = self.groups.get(group, GroupCosts())
        return self.model_copy(update=own.model_dump(exclude_none=True))
