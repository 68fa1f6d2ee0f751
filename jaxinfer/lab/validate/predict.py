"""Predicts a point's figures with the simulator."""

import statistics
from collections.abc import Sequence
from typing import Any

from jaxinfer.errors import JaxinferError
from jaxinfer.lab.validate.campaigns import PointSetup
from jaxinfer.serving.request_state import RequestState
from jaxinfer.simulate.run import simulate


def predict(asked: PointSetup) -> dict[str, Any]:
    """Return mean ``ttft_ms`` and ``tpot_ms`` over all requests, or ``refused`` with the reason."""
    arrivals = asked.data["workload"]["arrivals"]
    figures = RequestTimes(arrivals["concurrency"])
    try:
        config = asked.config
        simulate(config, config.requests(), on_request=figures.add)
    except JaxinferError as error:
        return {"refused": str(error)}
    return {f"{name}_ms": 1e3 * figures.mean(name, asked.first_wave) for name in ("ttft", "tpot")}


class RequestTimes:
    """Collects the times of a run's requests, and separately those of the first wave.

    Args:
        at_once: number of requests in the first wave.
    """

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._times: dict[str, tuple[list[float], list[float]]] = {
            "ttft": ([], []),
            "tpot": ([], []),
        }

    def add(self, request: RequestState, times: Sequence[float]) -> None:
        """Count a request whose tokens came at these times."""
        late = int(request.id) >= self._at_once
        self._times["ttft"][late].append(times[0] - request.arrival)
        if len(times) > 1:
            self._times["tpot"][late].append((times[-1] - times[0]) / (len(times) - 1))

    def mean(self, name: str, first_wave: float | None) -> float:
        """Return mean seconds over all requests, or with this weight for the first wave."""
        first, others = self._times[name]
        if first_wave is None or not others:
            return statistics.fmean([*first, *others])
        return first_wave * statistics.fmean(first) + (1 - first_wave) * statistics.fmean(others)
