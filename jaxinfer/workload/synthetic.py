"""Lengths drawn from published statistics, for work without a trace; and classes of requests."""

import math
import random
from bisect import bisect
from collections.abc import Iterator
from statistics import NormalDist
from typing import Literal

import yaml
from pydantic import Field

from jaxinfer.config.shipped import SHIPPED
from jaxinfer.config.validation import OptionError, Options, did_you_mean
from jaxinfer.errors import JaxinferError
from jaxinfer.workload.lengths import BenchRequest

_FACTS = SHIPPED / "lengths.yaml"
# Heavy or light prefill, heavy or light decode (TetriInfer, section 5.1; HexGen-2, section 5.1).
WorkloadClass = Literal["HPLD", "HPHD", "LPHD", "LPLD"]
_HEAVY_PREFILL, _HEAVY_DECODE = 512, 128
# A class is too rare if of so many draws in a row none is in it.
_PATIENCE = 10_000


class Synthetic(Options):
    """Requests whose prompt and output lengths are drawn independently of each other.

    Where the lengths have ``most_in_all``, pairs beyond it are drawn again, which makes long
    prompts and outputs rarer: the upper percentiles fall short of the published ones by up to 11 %.

    Attributes:
        lengths: a name in ``configs/lengths.yaml``.
        count: of requests.
        seed: of the draws.
    """

    lengths: str
    count: int = Field(default=1000, ge=1)
    seed: int = 0

    def requests(self, only: WorkloadClass | None = None) -> list[BenchRequest]:
        """They all arrive at 0.

        Raises:
            JaxinferError: there are no such lengths, or hardly any of the class.
        """
        draws, misses = self._draws(), 0
        found: list[BenchRequest] = []
        while len(found) < self.count:
            request = next(draws)
            if only is None or is_of_class(request, only):
                found.append(request)
                misses = 0
            elif (misses := misses + 1) == _PATIENCE:
                raise JaxinferError(f"only {only}: none of {misses} draws of {self.lengths} is")
        return found

    def _draws(self) -> Iterator[BenchRequest]:
        known = yaml.safe_load(_FACTS.read_text(encoding="utf-8"))
        if self.lengths not in known:
            raise OptionError(f"lengths is {self.lengths!r}: {did_you_mean(self.lengths, known)}")
        facts = known[self.lengths]
        prompt, output = Distribution(**facts["prompt"]), Distribution(**facts["output"])
        most = facts.get("most_in_all", math.inf)
        rng = random.Random(self.seed)
        while True:
            request = BenchRequest(None, prompt.draw(rng), output.draw(rng), 0.0)
            if request.prompt_len + request.max_tokens <= most:
                yield request


class Distribution:
    """Log-normal between given percentiles, and beyond the first and the last.

    Args:
        quantiles: percentile -> length, two at least.
        most: the largest length; the smallest is 1.
    """

    def __init__(self, quantiles: dict[int, int], most: int) -> None:
        self._z = [NormalDist().inv_cdf(percent / 100) for percent in quantiles]
        self._logs = [math.log(length) for length in quantiles.values()]
        self._most = most

    def draw(self, rng: random.Random) -> int:
        """One length."""
        z = rng.gauss()
        i = min(max(bisect(self._z, z), 1), len(self._z) - 1)
        (a, b), (fa, fb) = self._z[i - 1 : i + 1], self._logs[i - 1 : i + 1]
        return min(max(round(math.exp(fa + (fb - fa) * (z - a) / (b - a))), 1), self._most)


def is_of_class(request: BenchRequest, name: WorkloadClass) -> bool:
    """Whether prompt (more than 512 tokens) and output (more than 128) are heavy or light."""
    heavy_prefill, heavy_decode = name[0] == "H", name[2] == "H"
    prefill = request.prompt_len > _HEAVY_PREFILL
    return prefill == heavy_prefill and (request.max_tokens > _HEAVY_DECODE) == heavy_decode
