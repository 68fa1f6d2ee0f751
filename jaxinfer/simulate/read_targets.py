"""Reads targets from user input: ``ttft=1,tpot=0.1``, ``ttft:p90=2``, or a file of slowdowns."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import Field

from jaxinfer.config.run_file import load_run_file
from jaxinfer.errors import JaxinferError
from jaxinfer.options.validation import Named, OptionError, Options, read_yaml, within
from jaxinfer.simulate.isolated import reference_latencies
from jaxinfer.simulate.targets import (
    Criterion,
    PercentileTargets,
    Reference,
    RequestTargets,
    Targets,
)
from jaxinfer.workload.lengths import BenchRequest


class Slowdowns(Options):
    """A file of targets, as multiples of each request's latency alone on a reference machine.

    Attributes:
        reference: Run file of that machine, relative to the working directory.
        percentiles: Metric -> percentile -> multiple; all must hold.
        scale: Instead of ``percentiles``: metric -> multiple that a share of the requests must
            keep.
    """

    reference: str
    percentiles: Named[Named[float]] = Field(default_factory=dict)
    scale: Named[float] = Field(default_factory=dict)

    def model_post_init(self, context: object, /) -> None:
        """Refuse a file with both or neither of ``percentiles`` and ``scale``."""
        if bool(self.percentiles) == bool(self.scale):
            raise JaxinferError("give either percentiles or scale")


def read_targets(
    text: str,
    work: Sequence[BenchRequest],
    attainment: float | None = None,
    criterion: Criterion | None = None,
) -> Targets:
    """Read targets from user input.

    Args:
        text: limits in seconds per request (``ttft=1,tpot=0.1``) or per percentile
            (``ttft:p90=2``), or the path of a YAML file (see ``Slowdowns``), whose reference is
            simulated.
        work: the requests to serve.
        attainment: see ``RequestTargets``.
        criterion: see ``RequestTargets``.

    Raises:
        JaxinferError: a target is unknown, is given twice, or is not a number above 0; limits of
            percentiles are combined with others, an attainment or a criterion; or the file is
            wrong.
    """
    if text.endswith((".yaml", ".yml")):
        try:
            return _read_file(Path(text), work, attainment, criterion)
        except JaxinferError as error:
            raise JaxinferError(f"slo {text}: {error}") from None
    try:
        return _read_text(text, attainment, criterion)
    except JaxinferError as error:
        raise JaxinferError(f"slo {text!r}: {error}") from None


def _read_text(text: str, attainment: float | None, criterion: Criterion | None) -> Targets:
    limits: dict[tuple[str, float | None], float] = {}
    for part in text.split(","):
        name, percent, seconds = _read_part(part.strip())
        if (name, percent) in limits:
            what = name if percent is None else f"{name}:p{percent:g}"
            raise JaxinferError(f"{what} is given twice, give it once")
        limits[name, percent] = seconds
    percentiles = [(n, p, limit) for (n, p), limit in limits.items() if p is not None]
    if not percentiles:
        of_requests = {name: limit for (name, _), limit in limits.items()}
        return _request_targets(of_requests, attainment, criterion)
    if len(percentiles) < len(limits):
        raise JaxinferError("has limits of percentiles and limits of requests: give only one kind")
    return _percentile_targets(percentiles, attainment, criterion)


def _read_part(part: str) -> tuple[str, float | None, float]:
    name, _, value = part.partition("=")
    metric, colon, percent = (word.strip() for word in name.partition(":"))
    try:
        if colon and not percent.startswith("p"):
            raise ValueError
        return metric, float(percent[1:]) if colon else None, float(value)
    except ValueError:
        raise JaxinferError(f"{part!r} must look like ttft=1.5 or ttft:p90=1.5") from None


def _read_file(
    path: Path,
    work: Sequence[BenchRequest],
    attainment: float | None,
    criterion: Criterion | None,
) -> Targets:
    options = Slowdowns.model_validate(read_yaml(path))
    # Checked first, because the reference takes time.
    nobody = Reference({})
    targets: RequestTargets | PercentileTargets
    try:
        if options.scale:
            targets = _request_targets(options.scale, attainment, criterion, nobody)
        else:
            limits = [
                (metric, _percent(metric, percent), multiple)
                for metric, multiples in options.percentiles.items()
                for percent, multiple in multiples.items()
            ]
            targets = _percentile_targets(limits, attainment, criterion, nobody)
    except OptionError as error:
        raise within("scale" if options.scale else "percentiles", error) from None
    config = load_run_file(options.reference)
    return replace(targets, reference=reference_latencies(config, work))


def _percent(metric: str, percent: str) -> float:
    try:
        return float(percent)
    except ValueError:
        raise OptionError(f"{metric}.{percent}: must be a percentile: 90") from None


def _request_targets(
    limits: Mapping[str, float],
    attainment: float | None,
    criterion: Criterion | None,
    reference: Reference | None = None,
) -> RequestTargets:
    share = 0.9 if attainment is None else attainment
    return RequestTargets(limits, share, criterion or "both", reference)


def _percentile_targets(
    limits: Sequence[tuple[str, float, float]],
    attainment: float | None,
    criterion: Criterion | None,
    reference: Reference | None = None,
) -> PercentileTargets:
    for name, value in (("attainment", attainment), ("criterion", criterion)):
        if value is not None:
            raise JaxinferError(
                f"{name} is {value}, but a percentile's limit holds or does not: leave it out"
            )
    return PercentileTargets(limits, reference)
