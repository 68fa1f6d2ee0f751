"""One point's figures by the simulator."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxinfer.errors import JaxinferError
from jaxinfer.serving.request_state import RequestState
from jaxinfer.simulate.run import simulate
from jaxinfer.validate.campaigns import Campaigns, launch
from jaxinfer.validate.points import Point


@dataclass(frozen=True)
class Asked:
    """A point to be simulated; see ``launch``."""

    campaigns: Campaigns
    point: Point
    operators: str
    settings: Mapping[str, Any]


def predict(asked: Asked) -> dict[str, Any]:
    """``ttft_ms``, ``tpot_ms`` and ``e2e_ms``, all means; or ``refused``, why there are none."""
    point, figures = asked.point, Figures(asked.point.concurrency)
    try:
        how = launch(asked.campaigns, point, asked.operators, asked.settings)
        simulate(how.config, how.config.requests(), on_request=figures.add)
    except JaxinferError as error:
        return {"refused": str(error)}
    ttft, tpot = figures.mean("ttft", how.first_wave), figures.mean("tpot", how.first_wave)
    # As the points have it: of a request of nominal length.
    e2e = ttft + (point.osl - 1) * tpot
    return {"ttft_ms": ttft * 1e3, "tpot_ms": tpot * 1e3, "e2e_ms": e2e * 1e3}


class Figures:
    """Times of a run's requests, those sent at once apart.

    Args:
        at_once: requests of the first wave.
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
        """Seconds: the mean over all, or with this weight of the first wave."""
        first, others = self._times[name]
        if first_wave is None or not others:
            return statistics.fmean([*first, *others])
        return first_wave * statistics.fmean(first) + (1 - first_wave) * statistics.fmean(others)
