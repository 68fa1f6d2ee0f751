"""Requests with random lengths, and classes of requests."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field, PositiveInt, field_validator

from jaxinfer.errors import JaxinferError
from jaxinfer.files.shipped import read_shipped
from jaxinfer.options.validation import OptionError, Options, did_you_mean, shown
from jaxinfer.workload.bench_request import BenchRequest
from jaxinfer.workload.distribution import Draws, Lengths, Percentiles, Uniform

# Heavy or light prefill, and heavy or light decode (section 5.1 of TetriInfer and of HexGen-2).
WorkloadClass = Literal["HPLD", "HPHD", "LPHD", "LPLD"]
_HEAVY_PREFILL, _HEAVY_DECODE = 512, 128
# More tokens than any request has; a float holds all digits of it.
_MOST_TOKENS = 10**12
# A class is too rare if none of this many successive draws is in it.
_PATIENCE = 10_000


class Sessions(Options):
    """Options of synthetic sessions: conversations or agents whose prompts grow by each answer.

    Each turn's prompt consists of the previous prompt, its answer, and a number of new tokens that
    ``input_len`` draws.

    Attributes:
        turns: Requests of a session.
        think_s: Seconds from the end of a turn to the arrival of the next one: the time that a user
            or a tool takes.
    """

    turns: int = Field(ge=1)
    think_s: float = Field(default=0.0, ge=0)


class Prefixes(Options):
    """Options of prefixes that synthetic prompts share: system prompts, or documents.

    Attributes:
        count: Number of prefixes; each prompt begins with one of them, drawn uniformly.
        tokens: Tokens of each prefix, in addition to those of ``input_len``.
    """

    count: int = Field(default=1, ge=1)
    tokens: int = Field(ge=1, le=_MOST_TOKENS)


class Synthetic(Options):
    """Requests whose prompt and output lengths are drawn independently of each other.

    If the lengths have ``most_in_all``, pairs whose sum exceeds it are drawn again, which makes
    long prompts and outputs rarer: the upper percentiles are up to 11 % below the published ones.

    Attributes:
        lengths: A name in ``configs/lengths.yaml``, which has published percentiles of prompt and
            output lengths. Means are within 13 % of the published ones.
        input_len, output_len: Prompt and output tokens, drawn independently: a number, or a
            distribution.
        range_ratio: Turns each number n into the range from ``n * (1 - range_ratio)`` to
            ``n * (1 + range_ratio)``, as in vLLM.
        count: Number of requests; each turn of a session counts as one.
        prefixes: Prefixes that prompts share; in sessions, only the prompts of first turns begin
            with one.
        sessions: Makes the requests turns of sessions; each prompt begins with the previous turn.
        seed: Seed of the random lengths. Prompts do not depend on how outputs are drawn, nor
            outputs on prompts.
    """

    lengths: str | None = None
    input_len: PositiveInt | Lengths | None = None
    output_len: PositiveInt | Lengths | None = None
    range_ratio: float | None = Field(default=None, ge=0, lt=1)
    count: int = Field(default=1000, ge=1)
    prefixes: Prefixes | None = None
    sessions: Sessions | None = None
    seed: int = 0

    @field_validator("input_len", "output_len", mode="before")
    @classmethod
    def _as_lengths(cls, value: object) -> object:
        """Check a length as a number or as a distribution, whose error is then reported."""
        if isinstance(value, dict):
            try:
                return Lengths.model_validate(value)
            except JaxinferError as error:
                raise ValueError(error) from None
        if value is None or isinstance(value, Lengths):
            return value
        if type(value) is int and value > _MOST_TOKENS:
            raise ValueError(f"must be at most {_MOST_TOKENS:,} tokens")
        if type(value) is int and value >= 1:
            return value
        raise ValueError(
            f"must be an integer >= 1, or a mapping of kind (uniform, lognormal, percentiles) and "
            f"its options, not {shown(value)}"
        )

    def model_post_init(self, context: Any, /) -> None:
        """Refuse both or neither source of lengths, and a ratio without a number to vary."""
        own = {"input_len": self.input_len, "output_len": self.output_len}
        if self.lengths is not None:
            given = {**own, "range_ratio": self.range_ratio}
            if name := next((name for name, value in given.items() if value is not None), None):
                raise OptionError(f"{name}: lengths is {self.lengths}, which has both: give one")
        elif None in own.values():
            raise JaxinferError(
                "give lengths, a name in configs/lengths.yaml, or input_len and output_len"
            )
        elif self.range_ratio is not None and int not in map(type, own.values()):
            raise OptionError("range_ratio: is for an input_len or output_len that is a number")

    @property
    def is_drawn(self) -> bool:
        """True if the lengths depend on a seed; two fixed numbers do not."""
        return bool(self.range_ratio) or {type(self.input_len), type(self.output_len)} != {int}

    def requests(
        self, only: WorkloadClass | None = None, limit: int | None = None
    ) -> list[BenchRequest]:
        """Draw the requests, which all arrive at 0.

        Args:
            limit: largest number of requests to draw.

        Raises:
            JaxinferError: the lengths are unknown, or almost none are of the class.
        """
        if self.sessions and only:
            raise OptionError("sessions: with workload.only, turns would be missing: leave one out")
        draws, misses, rng = self._draws(), 0, random.Random(f"{self.seed} prefixes")
        found: list[BenchRequest] = []
        count = self.count if limit is None else min(self.count, limit)
        while len(found) < count:
            request = next(draws)
            if self.prefixes:
                request = _with_prefix(request, self.prefixes, rng)
            if only is None or is_of_class(request, only):
                found.append(request)
                misses = 0
            elif (misses := misses + 1) == _PATIENCE:
                which = self.lengths or "these lengths"
                raise JaxinferError(f"only {only}: none of {misses} draws of {which} is")
        return _as_turns(found, self.sessions) if self.sessions else found

    def _draws(self) -> Iterator[BenchRequest]:
        if self.lengths is None:
            yield from self._own_draws()
            return
        known = read_shipped("lengths.yaml")
        if self.lengths not in known:
            raise OptionError(f"lengths is {self.lengths!r}: {did_you_mean(self.lengths, known)}")
        facts = known[self.lengths]
        prompt, output = Percentiles(**facts["prompt"]), Percentiles(**facts["output"])
        most = facts.get("most_in_all", math.inf)
        rng = random.Random(self.seed)
        while True:
            request = BenchRequest(None, prompt.draw(rng), output.draw(rng), 0.0)
            if request.prompt_len + request.max_tokens <= most:
                yield request

    def _own_draws(self) -> Iterator[BenchRequest]:
        prompt, output = self._source(self.input_len), self._source(self.output_len)
        of_prompts, of_outputs = (random.Random(f"{self.seed} {n}") for n in ("input", "output"))
        while True:
            yield BenchRequest(None, prompt.draw(of_prompts), output.draw(of_outputs), 0.0)

    def _source(self, given: int | Lengths | None) -> Draws:
        if isinstance(given, Lengths):
            return given.draws()
        assert given
        ratio = self.range_ratio or 0.0
        return Uniform(max(math.floor(given * (1 - ratio)), 1), math.ceil(given * (1 + ratio)))


def _as_turns(work: Sequence[BenchRequest], sessions: Sessions) -> list[BenchRequest]:
    """Make each ``turns`` requests in a row the turns of one session."""
    found: list[BenchRequest] = []
    for index, item in enumerate(work):
        turn = index % sessions.turns
        item = replace(item, session=index - turn)
        if turn:
            before, own = found[-1], item.prompt_len - (item.prefix[1] if item.prefix else 0)
            item = replace(
                item,
                prompt_len=before.prompt_len + before.max_tokens + own,
                arrival=sessions.think_s,
                follows=index - 1,
                prefix=None,
            )
        found.append(item)
    return found


def _with_prefix(item: BenchRequest, prefixes: Prefixes, rng: random.Random) -> BenchRequest:
    return replace(
        item,
        prompt_len=prefixes.tokens + item.prompt_len,
        prefix=(rng.randrange(prefixes.count), prefixes.tokens),
    )


def is_of_class(request: BenchRequest, name: WorkloadClass) -> bool:
    """Tell whether a request is of a class: heavy is a prompt above 512, an output above 128."""
    heavy_prefill, heavy_decode = name[0] == "H", name[2] == "H"
    prefill = request.prompt_len > _HEAVY_PREFILL
    return prefill == heavy_prefill and (request.max_tokens > _HEAVY_DECODE) == heavy_decode
