"""What an instance decides by configuration: order, admission, batch forming, victims."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.system import Leg
from jaxinfer.serving.world import Row

if TYPE_CHECKING:
    from jaxinfer.serving.instance import Instance


def first_come_first_served(waiting: Sequence[RequestState]) -> RequestState:
    """The head of the queue: a preempted request, else the one that has waited longest."""
    return waiting[0]


def greedy(instance: "Instance", request: RequestState, leg: Leg) -> bool:
    """Admit where the leg's tokens known so far fit and the watermark stays free.

    Without a watermark, the growth of the running requests would evict what has just come in,
    for ever. An instance that runs nothing ignores it.
    """
    free = instance.kv.num_free - instance.pages_to_take(request, leg)
    return free >= (0 if instance.is_idle else instance.watermark_pages)


def latest(candidates: Sequence[RequestState]) -> RequestState:
    """Preempt the request admitted last, so that the oldest always gets to its end."""
    return candidates[-1]


def mixed(instance: "Instance") -> list[Row]:
    """Decodes first, then prefill chunks of what runs, then of what is admitted.

    All under the instance's token budget: chunked prefill as in Sarathi-Serve.
    """
    budget = instance.options.max_num_batched_tokens
    budget -= instance.launch_group(budget)
    rows: list[Row] = []
    prefills: list[RequestState] = []
    for request in instance.ungrouped():
        todo, launched = 1, request.launched
        # Most are decodes of a last leg, with one token to go: asking costs more than the rest.
        if (
            launched + 1 != request.prompt_len + len(request.output_token_ids)
            or launched >= request.peak_tokens
            or request.legs[0].until is not None
        ):
            todo = request.leg_goal - launched
        if todo > 1:
            prefills.append(request)
        elif todo and budget and (row := instance.plan_row(request, 1, rows)):
            rows.append(row)
            budget -= 1
    for request in prefills:
        if budget and (row := _chunk(instance, request, budget, rows)):
            rows.append(row)
            budget -= row.count
    while budget and (admitted := instance.admit_next()):
        if row := _chunk(instance, admitted, budget, rows):
            rows.append(row)
            budget -= row.count
    return rows


def _chunk(instance: "Instance", request: RequestState, budget: int, rows: list[Row]) -> Row | None:
    count = min(request.leg_goal - request.launched, budget)
    return instance.plan_row(request, count, rows) if count > 0 else None


@dataclass(frozen=True)
class Policies:
    """The policies of one instance."""

    order: Callable[[Sequence[RequestState]], RequestState] = first_come_first_served
    admit: Callable[["Instance", RequestState, Leg], bool] = greedy
    form_batch: Callable[["Instance"], list[Row]] = mixed
    victim: Callable[[Sequence[RequestState]], RequestState] = latest
