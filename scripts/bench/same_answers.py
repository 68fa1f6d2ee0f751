"""Compare the answers of two runs of the same greedy requests."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxinfer.request import RequestOutput

# Number of likeliest tokens whose log probabilities the first run keeps at each position.
TOP = 5


@dataclass
class ComparedAnswers:
    """The output tokens of a run, and the likely tokens at each position.

    Attributes:
        tokens: output tokens by request.
        likely: log probabilities by token, for each position of a request; empty if not requested.
    """

    tokens: dict[str, list[int]] = field(default_factory=dict)
    likely: dict[str, list[dict[int, float]]] = field(default_factory=dict)

    def add(self, output: RequestOutput) -> None:
        """Add a request's answer."""
        (answer,) = output.outputs
        self.tokens[output.request_id] = list(answer.token_ids)
        if answer.logprobs:
            self.likely[output.request_id] = [
                {token: each.logprob for token, each in here.items()} for here in answer.logprobs
            ]

    def write(self, path: Path) -> None:
        """Write a file that ``read`` reads."""
        path.write_text(json.dumps({"tokens": self.tokens, "likely": self.likely}) + "\n")

    @classmethod
    def read(cls, path: Path) -> "ComparedAnswers":
        """Read a file that ``write`` has written."""
        data: Any = json.loads(path.read_text())
        likely = {
            name: [{int(token): found for token, found in here.items()} for here in positions]
            for name, positions in data["likely"].items()
        }
        return cls(data["tokens"], likely)


@dataclass(frozen=True)
class Comparison:
    """The requests of a run, compared with those of another run.

    Attributes:
        equal: number of requests with the same tokens.
        tied: number of requests that differ from a tie on. At a tie, the first run gave both tokens
            about the same probability; from there on, the two runs continue different texts.
        apart: all other requests.
        tokens: number of compared tokens: those before requests differ.
        largest_gap: largest difference between the log probabilities of two tied tokens.
    """

    equal: int
    tied: int
    apart: Sequence[str]
    tokens: int
    largest_gap: float


def compare(first: ComparedAnswers, second: ComparedAnswers, bound: float) -> Comparison:
    """Compare a run's answers with those of an earlier run.

    Args:
        bound: largest difference of log probabilities that counts as a tie.
    """
    equal, tied, tokens, largest = 0, 0, 0, 0.0
    apart = sorted(first.tokens.keys() ^ second.tokens.keys())
    for name in first.tokens.keys() & second.tokens.keys():
        ours, theirs = first.tokens[name], second.tokens[name]
        pairs = enumerate(zip(ours, theirs, strict=False))
        at = next((position for position, (a, b) in pairs if a != b), None)
        tokens += min(len(ours), len(theirs)) if at is None else at
        if at is None and len(ours) == len(theirs):
            equal += 1
            continue
        gap = _gap(first, name, at, theirs)
        if gap is None or gap > bound:
            apart.append(name)
            continue
        tied, largest = tied + 1, max(largest, gap)
    return Comparison(equal, tied, sorted(apart), tokens, largest)


def _gap(first: ComparedAnswers, name: str, at: int | None, theirs: Sequence[int]) -> float | None:
    """Return by how much the first run found the other's token less likely; None if unknown."""
    if at is None or name not in first.likely:
        return None
    here = first.likely[name][at]
    found = here.get(theirs[at])
    return None if found is None else here[first.tokens[name][at]] - found
