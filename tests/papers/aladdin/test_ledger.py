"""Aladdin's books: what they have of answers that end before what was predicted."""

from types import SimpleNamespace
from typing import Any

import pytest
from aladdin_cases import FIT, instance
from serving_checks import make_requests

from jaxinfer.papers.aladdin.best_fit import WorkerAccount
from jaxinfer.papers.aladdin.ledger import WorkerLedger, limits_of
from jaxinfer.papers.aladdin.rebalance import Errors

# A prompt, and how long its answer is predicted to be.
PROMPT, PREDICTED = 4, 10
ATGT_S = 2.0


def books() -> tuple[WorkerLedger, Any, WorkerAccount, Any]:
    """Return books, a cluster to look at, a worker with a request, and the request."""
    placed = WorkerLedger(
        lambda view: limits_of(view, 8.0, ATGT_S, 0.75, 0.5), True, lambda name: 1.0
    )
    cluster: Any = SimpleNamespace(now=0.0, instances={"a": instance("a")})
    ((worker,),) = placed.look(cluster, ["a"])
    (request,) = make_requests([(PROMPT, 90)])
    request.predicted = (PREDICTED, PREDICTED)
    placed.give(placed.job(request, True), worker)
    assert worker.context == PROMPT + 0.5 * PREDICTED
    return placed, cluster, worker, request


def at_end(request: Any, output: int) -> Any:
    """A request as it is when it has ended."""
    return SimpleNamespace(id=request.id, prompt_len=PROMPT, num_known=PROMPT + output)


@pytest.mark.parametrize("output", [2, 9, 10, 15])
def test_an_early_end_counts_until_the_predicted_one(output: int) -> None:
    """An ended request counts with its entries for a target's time per token left out."""
    placed, cluster, worker, request = books()
    ended = 5.0
    placed.ended(at_end(request, output), ended)
    assert (worker.jobs, worker.context, worker.empty_since) == ({}, 0, ended)
    until = ended + ATGT_S * max(PREDICTED - output, 0)
    counted = Errors(FIT.decode, -(PROMPT + output), -1)
    nothing = Errors(FIT.decode, 0, 0)
    for now, found in ((until - 0.25, counted), (until, nothing), (until + 1, nothing)):
        if now >= ended:
            cluster.now = now
            assert placed.errors(worker) == found


def test_early_ends_add_up() -> None:
    placed, cluster, worker, request = books()
    (other,) = make_requests([(PROMPT, 90)])
    other.id, other.predicted = "other", (PREDICTED, PREDICTED)
    placed.give(placed.job(other, True), worker)
    placed.ended(at_end(request, 2), 0.0)
    placed.ended(at_end(other, 8), 1.0)
    # The one until 16, the other until 5.
    for now, tokens, requests in ((4.5, -6 - 12, -2), (5.5, -6, -1), (16.5, 0, 0)):
        cluster.now = now
        assert placed.errors(worker) == Errors(FIT.decode, tokens, requests)
