"""An instance's limits."""

from dataclasses import dataclass
from typing import Literal

from jaxinfer.serving.request_state import RequestState


@dataclass(frozen=True)
class InstanceOptions:
    """Limits of one instance.

    Attributes:
        max_num_seqs: largest number of requests that run or are imported at a time.
        max_num_batched_tokens: largest number of tokens computed in one step.
        max_in_flight: largest number of launched, uncommitted batches: one per pipeline stage, and
            one more to launch ahead.
        launch_ahead: whether a decode may be launched while its input token is still on the device.
        chunks_in_flight: 1 makes each chunk of a prompt wait until the step of its previous chunk
            has ended.
        max_transfers_in_flight: largest number of requests that are imported at a time.
        watermark: fraction of the pages that admission leaves free.
        late_tokens: treatment of tokens that steps in flight sample for a preempted request.
        empty_waits: if no batch could be formed while steps are in flight, the next is formed once
            one of them has ended.
        computes: whether a system sees it; otherwise it only keeps pages for others.
        tier: name of the instance that keeps copies of ended requests' pages, if there is one.
        tier_takes: requests whose pages that instance keeps.
        micro_batches: number of parts in which each step's rows are computed, in turn.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_in_flight: int = 2
    launch_ahead: bool = True
    chunks_in_flight: Literal[1, "all"] = "all"
    max_transfers_in_flight: int = 4
    watermark: float = 0.01
    late_tokens: Literal["dropped", "kept"] = "dropped"
    empty_waits: bool = False
    computes: bool = True
    tier: str | None = None
    tier_takes: Literal["all", "sessions"] = "all"
    micro_batches: int = 1

    def tier_of(self, request: RequestState) -> str | None:
        """Return the name of the instance that keeps copies of a request's pages, if any."""
        takes = self.tier_takes == "all" or request.session is not None
        return self.tier if takes else None
