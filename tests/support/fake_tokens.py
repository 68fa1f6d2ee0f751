"""Tokens of a world without a model: each depends on all before it, in closed form."""

from collections.abc import Iterable

from jaxinfer.serving.request_state import RequestState

# A multiplicative hash; what matters is that each token depends on all before it.
PRIME, MODULUS = 1_000_003, 2**61 - 1


def prompt_token(request_id: str, position: int) -> int:
    return (sum(map(ord, request_id)) * PRIME + position * 7919) % 50_021


def next_token(request_id: str, tokens: Iterable[int]) -> int:
    """The token sampled after ``tokens``."""
    state = sum(map(ord, request_id))
    for token in tokens:
        state = (state * PRIME + token + 1) % MODULUS
    return state % 50_021


def logprob_of(token: int) -> float:
    """Return a sampled token's log probability in this world; sums of them are exact."""
    return -(1 + token % 64) / 64


class Reference:
    """Tokens of one request as if it were alone in the world, in closed form."""

    def __init__(self, request: RequestState) -> None:
        # Requests with a given prompt continue equal prompts equally.
        self.id = "" if request.prompt_token_ids else request.id
        self.prompt_len = request.prompt_len
        self._tokens = list(request.prompt_token_ids) or [
            prompt_token(request.id, p) for p in range(request.prompt_len)
        ]
        self._beginnings: list[tuple[int, ...]] = [()]

    def token(self, position: int) -> int:
        while len(self._tokens) <= position:
            self._tokens.append(next_token(self.id, self._tokens))
        return self._tokens[position]

    def beginning(self, count: int) -> tuple[int, ...]:
        """The first ``count`` tokens, as the same object each time: equal ones compare fast."""
        while len(self._beginnings) <= count:
            number = len(self._beginnings) - 1
            self._beginnings.append((*self._beginnings[number], self.token(number)))
        return self._beginnings[count]

    def output(self, count: int) -> list[int]:
        return [self.token(self.prompt_len + i) for i in range(count)]
