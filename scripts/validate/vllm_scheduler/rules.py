"""Rules that both sides go by: which tokens there are, and how long a step takes.

Standard library alone: vLLM's Python reads this file, too. Times are whole microseconds.
"""

from collections.abc import Sequence

END_TOKEN = 1
# Events of one moment, in the order in which an engine's loop takes them in.
ABORT, STEP_END, ARRIVAL = range(3)


def token(seed: int, position: int) -> int:
    """Draw the token at a position; never the one that ends a request."""
    mixed = (seed * 2654435761 + position * 40503 + 12345) & 0xFFFFFFFF
    mixed = (mixed ^ (mixed >> 15)) * 2246822519 & 0xFFFFFFFF
    return 2 + (mixed ^ (mixed >> 13)) % 30_000


def prompt_tokens(family: int, shared: int, own: int, length: int) -> list[int]:
    """Make a prompt whose first ``shared`` tokens are those of its family."""
    first = [token(family, position) for position in range(min(shared, length))]
    return first + [token(own, position) for position in range(len(first), length)]


def output_token(seed: int, prompt_len: int, index: int, stop_after: int) -> int:
    """Draw a request's output token; the last of ``stop_after`` ends it, 0 being no such end."""
    return END_TOKEN if index + 1 == stop_after else token(seed, prompt_len + index)


def step_us(number: int, tokens: int, rows: int) -> int:
    """Return how long a step takes, the ``number``-th of the run."""
    return 300 + 9 * tokens + 21 * rows + number * 131 % 97 * 4


def shown_rows(rows: Sequence[tuple[str, int]], counts_only: bool) -> list[object]:
    """Return a batch's rows as a decision has them: all of them, or their number and tokens."""
    if counts_only:
        return [len(rows), sum(count for _, count in rows)]
    return [list(row) for row in rows]
