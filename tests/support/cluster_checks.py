"""Runs of a cluster, and what is to be true of each."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster_cases import (
    HEAD_DIM,
    HEADS,
    LAYERS,
    LENGTHS,
    PEAK,
    Case,
    Pair,
    Request,
    Way,
    cut_of,
    make_requests,
    set_pools,
    set_system,
)

from jaxinfer import LLM
from jaxinfer.report.records import RequestRecord, RunRecord, read_run

REQUESTS = make_requests()
PROMPT_TOKENS = sum(prompt for prompt, _ in LENGTHS)
DECODE_TOKENS = sum(output - 1 for _, output in LENGTHS)
# Of times in a run's files.
ROUNDING = 2e-6


@dataclass(frozen=True)
class Done:
    """A request's tokens, and the sum of their log probabilities."""

    tokens: list[int]
    logprob: float

    def __eq__(self, other: object) -> bool:
        """Log probabilities are compared as far as the order of additions leaves them."""
        assert isinstance(other, Done)
        return self.tokens == other.tokens and abs(self.logprob - other.logprob) < 1e-3


def serve(
    llm: LLM, requests: Sequence[Request] = REQUESTS, run_dir: Path | None = None
) -> list[Done]:
    prompts = [{"prompt_token_ids": list(request.prompt)} for request in requests]
    params = [request.params for request in requests]
    outputs = llm.generate(prompts, params, progress=False, run_dir=run_dir)
    completions = [output.outputs[0] for output in outputs]
    return [Done(c.token_ids, c.cumulative_logprob or 0.0) for c in completions]


@dataclass(frozen=True)
class Ran:
    """A run as its folder tells it."""

    record: RunRecord

    @classmethod
    def last(cls, folder: Path) -> "Ran":
        number = max(int(path.name) for path in folder.iterdir())
        return cls(read_run(folder / str(number)))

    @property
    def metrics(self) -> dict[str, Any]:
        return self.record.run["metrics"]

    @property
    def instances(self) -> set[str]:
        """The instances that ran a step."""
        return {step.instance for step in self.record.steps}

    @property
    def requests(self) -> list[RequestRecord]:
        """The requests' records, in the order of the workload."""
        return sorted(self.record.requests, key=lambda request: int(request.id))

    def prefilled(self, instance: str) -> int:
        return sum(s.prefill_tokens for s in self.record.steps if s.instance == instance)

    def decoded(self, instance: str) -> int:
        return sum(s.decode_tokens for s in self.record.steps if s.instance == instance)

    def moved(self, number: int) -> list[int]:
        """Tokens of each transfer of a request, by its place in the workload."""
        name = self.requests[number].id
        return [t.num_tokens for t in self.record.transfers if t.request == name]


def check_case(case: Case, llm: LLM, expected: list[Done], folder: Path) -> None:
    pair, way = case.pair, case.way
    set_system(llm, way.options)
    pools = {}
    if way.small:  # Of the pages that the longest request takes.
        pools[way.small] = getattr(pair, way.small).pages(PEAK)
    set_pools(llm, pools, way.caching != "off")
    for _ in range(1 + (way.caching == "twice")):
        assert serve(llm, run_dir=folder) == expected
    check_run(Ran.last(folder), pair, way)


def check_run(ran: Ran, pair: Pair, way: Way) -> None:
    """Steps, cuts and transfers are those of the way, as far as it decides them."""
    assert ran.metrics["late_compiles"] == ran.metrics["failed"] == 0
    check_transfers(ran, token_bytes(pair.heads))
    check_cached(ran, pair, way)
    if way.system == "data_parallel":
        assert ran.instances == {"a", "b"}
        assert not ran.record.transfers
        assert [request.cut for request in ran.requests] == [0] * len(LENGTHS)
    else:
        check_hand_offs(ran, way, getattr(pair, way.ends[1]).page_size)
    if way.small:
        # Only outputs outgrow what was reserved.
        outputs_here = way.system == "data_parallel" or way.small == way.ends[1]
        assert (ran.metrics["preemptions"] > 0) == outputs_here
        assert ran.metrics["preemptions"] == sum(r.preemptions for r in ran.requests)
    else:
        check_nothing_is_computed_twice(ran)


def check_nothing_is_computed_twice(ran: Ran) -> None:
    assert ran.metrics["preemptions"] == 0
    prefilled = sum(ran.prefilled(name) for name in ran.instances)
    assert prefilled == PROMPT_TOKENS - ran.metrics["cached_tokens"]
    assert sum(ran.decoded(name) for name in ran.instances) == DECODE_TOKENS


def token_bytes(heads: str, itemsize: int = 4) -> int:
    """Keys and values of one token."""
    return 2 * LAYERS * HEADS[heads][1] * HEAD_DIM * itemsize


def check_transfers(ran: Ran, bytes_per_token: int) -> None:
    for transfer in ran.record.transfers:
        assert transfer.num_tokens > 0
        assert transfer.num_bytes == transfer.num_tokens * bytes_per_token
        assert transfer.requested <= transfer.start + ROUNDING
        assert transfer.start < transfer.end
        assert 0 <= transfer.hidden_s <= transfer.end - transfer.start + ROUNDING


def check_cached(ran: Ran, pair: Pair, way: Way) -> None:
    """A request starts with the full pages of its first leg that are there, less its last token."""
    found = ran.metrics["cached_tokens"]
    if way.caching == "off":
        assert found == 0
    elif way.system != "data_parallel":
        first = way.ends[0] if cut_of(way.cut, 1) else way.ends[1]
        size = getattr(pair, first).page_size
        legs = [cut_of(way.cut, prompt) or prompt for prompt, _ in LENGTHS]
        most = sum((end - 1) // size * size for end in legs)
        if way.caching == "twice" and not way.small:
            assert found == most
        assert found <= most


def check_hand_offs(ran: Ran, way: Way, page_size: int | None = None) -> None:
    """Check what was sent.

    Args:
        page_size: of the destination; None where it is not known.
    """
    source, dest = way.ends
    cuts = [cut_of(way.cut, prompt) for prompt, _ in LENGTHS]
    ends_first = [
        cut == prompt and output == 1 for cut, (prompt, output) in zip(cuts, LENGTHS, strict=True)
    ]
    handed_on = [0 if ends else cut for cut, ends in zip(cuts, ends_first, strict=True)]
    assert [request.cut for request in ran.requests] == handed_on
    assert ran.instances == ({source, dest} if any(cuts) else {dest})
    assert all((t.source, t.dest) == (source, dest) for t in ran.record.transfers)
    assert ran.decoded(source) == 0
    if way.small:
        return  # Room may be taken back, and the KV sent again, or computed where it is needed.
    if any(cuts):
        assert ran.prefilled(source) == sum(cuts) - ran.metrics["cached_tokens"]
    for number, (cut, ends) in enumerate(zip(cuts, ends_first, strict=True)):
        moved = ran.moved(number)
        # With a prefix cache, full pages that the destination has of other requests are not sent.
        least = most = cut
        if way.caching != "off":
            least = cut % page_size if page_size else 0
        if way.caching == "twice" and page_size:  # It has all of this request's.
            most = least
        if way.rule not in ("per_chunk", "per_segment"):
            assert len(moved) <= 1
            assert (0 if ends else least) <= sum(moved) <= (0 if ends else most)
        elif ends or not cut:
            # Some pieces may be on their way by the first token, which is the last.
            assert sum(moved) < max(cut, 1)
        else:
            # Sent once more where no seat was free for the last piece.
            assert least <= sum(moved) <= 2 * cut
