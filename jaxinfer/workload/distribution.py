"""Lengths of prompts or outputs: fixed, or drawn from a distribution in a run file."""

import math
import random
from bisect import bisect
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any, Literal, Protocol

from pydantic import Field, field_validator

from jaxinfer.errors import JaxinferError
from jaxinfer.options.validation import OptionError, Options

# Options that each kind needs, and options that it may have.
_NEEDS = {"uniform": ("min", "max"), "lognormal": (), "percentiles": ("values",)}
_MAY = {
    "uniform": (),
    "lognormal": ("median", "sigma", "mean", "std", "min", "max"),
    "percentiles": ("min", "max"),
}


class Draws(Protocol):
    """A source of lengths."""

    def draw(self, rng: random.Random) -> int:
        """Draw a length."""


class Lengths(Options):
    """A distribution of lengths in tokens.

    Lengths below ``min`` become ``min``, and lengths above ``max`` become ``max``.

    Attributes:
        kind: Shape of the distribution.
        min, max: Limits, to which lengths are clipped.
        median, sigma: Parameters of ``lognormal``: its median, and the standard deviation of the
            logarithm.
        mean, std: Mean and standard deviation before clipping, in place of ``median`` and
            ``sigma``.
        values: Lengths at given percentiles, as in ``{50: 400, 99: 4000}``; lengths in between
            follow log-normal pieces. The outer pieces continue to ``min`` and ``max``. If 0 or 100
            is given, lengths end there, and the logarithm is uniform in the outer piece (see
            ``Percentiles``).
    """

    kind: Literal["uniform", "lognormal", "percentiles"]
    min: int = Field(default=1, ge=1)
    max: int | None = Field(default=None, ge=1)
    median: float | None = Field(default=None, gt=0)
    sigma: float | None = Field(default=None, ge=0)
    mean: float | None = Field(default=None, gt=0)
    std: float | None = Field(default=None, ge=0)
    values: dict[float, float] | None = Field(default=None, strict=False)

    @field_validator("values", mode="before")
    @classmethod
    def _from_json(cls, value: object) -> object:
        """Accept keys that are texts, as in JSON, which a run's record is."""
        if not isinstance(value, dict):
            return value
        numbers = {}
        for percent, length in value.items():
            try:
                numbers[float(percent) if isinstance(percent, str) else percent] = length
            except ValueError:
                raise ValueError(f"{percent!r} is no percentile") from None
        return numbers

    def model_post_init(self, context: Any, /) -> None:
        """Refuse options that the kind does not use, and missing ones that it needs."""
        for name in self.model_fields_set - {"kind", *_NEEDS[self.kind], *_MAY[self.kind]}:
            raise OptionError(f"{name} is not for kind {self.kind}")
        for name in _NEEDS[self.kind]:
            if name not in self.model_fields_set:
                raise JaxinferError(f"kind {self.kind} needs {name}")
        if self.max is not None and self.min > self.max:
            raise OptionError(f"min is {self.min}, must be at most max, {self.max}")
        if self.kind == "lognormal":
            pairs = [("median", "sigma"), ("mean", "std")]
            given = [pair for pair in pairs if self.model_fields_set & {*pair}]
            if len(given) != 1 or None in (getattr(self, name) for name in given[0]):
                raise JaxinferError("kind lognormal needs median and sigma, or mean and std")
        if self.values is not None:
            _check(self.values)

    def draws(self) -> Draws:
        """Return the source that draws these lengths."""
        most = math.inf if self.max is None else self.max
        if self.kind == "uniform":
            assert self.max is not None
            return Uniform(self.min, self.max)
        if self.kind == "lognormal":
            return LogNormal(*self._of_the_logarithm(), self.min, most)
        assert self.values
        return Percentiles(self.values, most, self.min)

    def _of_the_logarithm(self) -> tuple[float, float]:
        """Return mean and standard deviation of the logarithm."""
        if self.median is not None and self.sigma is not None:
            return math.log(self.median), self.sigma
        assert self.mean is not None
        assert self.std is not None
        ratio = math.log(self.std) - math.log(self.mean) if self.std else -math.inf
        # Its square may exceed the largest float.
        variance = math.log1p((self.std / self.mean) ** 2) if ratio < 100 else 2 * ratio
        return math.log(self.mean) - variance / 2, math.sqrt(variance)


def _check(values: Mapping[float, float]) -> None:
    if len(values) < 2:
        raise OptionError("values: needs two percentiles at least")
    percents, lengths = list(values), list(values.values())
    if not all(0 <= percent <= 100 for percent in percents):
        raise OptionError(f"values: percentiles are {percents}, must be from 0 to 100")
    if percents != sorted(percents) or lengths != sorted(lengths) or lengths[0] < 1:
        raise OptionError("values: percentiles and lengths must rise, lengths from 1 on")
    inner = [percent for percent in percents if 0 < percent < 100]
    if len(inner) < 2 and not (percents[0] == 0 and percents[-1] == 100):
        raise OptionError(
            f"values: {percents} leave open what lies beyond: give 0 and 100, or two between them"
        )


class Uniform:
    """Lengths between two limits, equally likely."""

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most

    def draw(self, rng: random.Random) -> int:
        """Draw a length."""
        return rng.randint(self._least, self._most)


class LogNormal:
    """Log-normal lengths, rounded and clipped.

    Args:
        mu: mean of the logarithm.
        sigma: standard deviation of the logarithm.
    """

    def __init__(self, mu: float, sigma: float, least: int, most: float) -> None:
        self._mu, self._sigma, self._least, self._most = mu, sigma, least, most

    def draw(self, rng: random.Random) -> int:
        """Draw a length."""
        return _clip(self._mu + self._sigma * rng.gauss(), self._least, self._most)


class Percentiles:
    """Log-normal lengths between given percentiles, and beyond the first and the last.

    If 0 or 100 is given, no length lies beyond it, and the logarithm is uniform up to there.

    Args:
        quantiles: percentile -> length, at least two.
        most: largest length.
        least: smallest length.
    """

    def __init__(self, quantiles: Mapping[float, float], most: float, least: int = 1) -> None:
        self._shares = [percent / 100 for percent in quantiles]
        self._z = [_z(share) for share in self._shares]
        self._logs = [math.log(length) for length in quantiles.values()]
        self._most, self._least = most, least

    def draw(self, rng: random.Random) -> int:
        """Draw a length."""
        z = rng.gauss()
        i = min(max(bisect(self._z, z), 1), len(self._z) - 1)
        a, b = self._z[i - 1 : i + 1]
        fa, fb = self._logs[i - 1 : i + 1]
        if math.isinf(a) or math.isinf(b):
            a, b = self._shares[i - 1 : i + 1]
            z = NormalDist().cdf(z)
        return _clip(fa + (fb - fa) * (z - a) / (b - a), self._least, self._most)


def _z(share: float) -> float:
    return NormalDist().inv_cdf(share) if 0 < share < 1 else math.copysign(math.inf, share - 0.5)


def _clip(log: float, least: int, most: float) -> int:
    # Above e^50, there is no length, and floats soon overflow.
    return int(min(max(round(math.exp(min(log, 50.0))), least), most))
