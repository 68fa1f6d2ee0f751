"""Limits in seconds, of whatever kind targets are."""

from typing import NamedTuple

from jaxinfer.simulate.targets import PercentileTargets, RequestTargets, Targets


class Limit(NamedTuple):
    """A metric's limit in seconds, and the share of what it is of that has to keep it."""

    metric: str
    seconds: float
    share: float


def limits(targets: Targets) -> list[Limit]:
    """All of them; none of targets in multiples of a reference."""
    if targets.reference:
        return []
    if isinstance(targets, PercentileTargets):
        return [Limit(metric, limit, percent / 100) for metric, percent, limit in targets.limits]
    assert isinstance(targets, RequestTargets)
    return [Limit(name, limit, targets.attainment) for name, limit in targets.limits.items()]


def gap_limits(targets: Targets) -> list[Limit]:
    """Those of the time between two tokens, the least first."""
    found = [limit for limit in limits(targets) if limit.metric in ("tbt", "tpot")]
    return sorted(found, key=lambda limit: limit.seconds)
