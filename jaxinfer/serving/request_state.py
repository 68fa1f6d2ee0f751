"""The state of a request in the loop: a few ordered counters, and the places of its KV."""

from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b

from jaxinfer.request import FinishReason, RequestMetrics
from jaxinfer.serving.kv_shards import HeldPages
from jaxinfer.serving.system import MoveSlices
from jaxinfer.serving.views import Leg


class RequestState:
    """A request on its way through its legs.

    The counters are ordered: ``computed <= launched < num_known + pending``. While decoding,
    ``computed`` is one below ``num_known``: the last token's KV entry is not yet written.

    Args:
        id: unique in the run.
        prompt_len: number of prompt tokens, at least 1.
        max_tokens: largest number of output tokens, at least 1.
        arrival: time in seconds on the world's clock.
        prompt_token_ids: the prompt; a simulated world needs none.
        payload: data for the world (sampling parameters); the loop never reads it.

    Attributes:
        peak_tokens: largest number of KV entries; the last token needs none.
        output_token_ids: tokens that have reached the host.
        details: the world's report on each output token, if any.
        prompt_details: the world's report on the prompt, by position.
        prompt_digests: digests of the prompt's full pages, by page size, if the world knows them
            without the tokens; a page size may have none.
        after_ends: number of requests that must have ended before this one arrives, ``arrival``
            seconds later.
        follows: the previous turn: the request arrives ``arrival`` seconds after that one has
            ended, and its prompt begins with the tokens of that one.
        session: name of the session that it belongs to, if any.
        predicted: smallest and largest predicted number of output tokens, if predicted.
        goes_first: whether it joins a queue at its head.
        takes_cached: whether it may start with pages of the prefix cache.
        computed: existing KV entries, in ``hold`` or, between two legs, in ``exported``.
        launched: KV entries that exist or that a step in flight writes.
        pending: number of tokens that steps in flight will sample.
        epoch: number of preemptions, plus 1 after the end; steps and transfers of an older epoch
            are void.
        legs: the current leg and the next ones; empty while the system has to route the request.
        hold: pages in the instance of the current leg.
        exported: instance and pages of the last leg, until the KV has been fetched.
        incoming: pages reserved ahead at the next leg's instance.
        sent: KV entries whose transfer to the next leg's instance has started.
        transfers: number of transfers of this epoch in flight.
        hands_over_first: whether its KV leaves the leg that sampled the first token, and no other
            instance has had all of it yet.
        paused: whether the system has excluded it from steps.
        slice_copy: a move of KV heads within the instance whose full pages are being copied while
            the request continues.
        slice_move: a move of KV heads for which the request is paused.
        slices_copied: KV entries that were copied before this pause.
    """

    __slots__ = (
        "__weakref__", "_digests", "after_ends", "arrival", "computed", "cumulative_logprob",
        "details", "epoch", "error", "exported", "finish_reason", "follows", "goes_first",
        "hands_over_first", "hold", "id", "incoming", "launched", "legs", "max_tokens",
        "metrics", "output_token_ids", "paused", "payload", "peak_tokens", "pending", "predicted",
        "prompt_details", "prompt_digests", "prompt_len", "prompt_token_ids", "sent", "session",
        "slice_copy", "slice_move", "slices_copied", "stop_reason", "takes_cached", "transfers",
    )  # fmt: skip

    def __init__(
        self,
        id: str,
        prompt_len: int,
        max_tokens: int,
        arrival: float = 0.0,
        prompt_token_ids: Sequence[int] = (),
        payload: object = None,
    ) -> None:
        if prompt_len < 1 or max_tokens < 1:
            raise ValueError(f"request {id!r}: {prompt_len} prompt and {max_tokens} output tokens")
        self.id = id
        self.prompt_len = prompt_len
        self.max_tokens = max_tokens
        self.peak_tokens = prompt_len + max_tokens - 1
        self.arrival = arrival
        self.prompt_token_ids = prompt_token_ids
        self.payload = payload
        self.output_token_ids: list[int] = []
        self.cumulative_logprob = 0.0
        self.details: list[object] = []
        self.prompt_details: dict[int, object] = {}
        self.after_ends = 0
        self.follows: RequestState | None = None
        self.session: str | None = None
        self.predicted: tuple[int, int] | None = None
        self.goes_first = False
        self.takes_cached = True
        self.prompt_digests: Callable[[int], list[bytes]] | None = None
        self._digests: dict[int, list[bytes]] = {}
        self.metrics = RequestMetrics(arrival)
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None

        self.computed = 0
        self.launched = 0
        self.pending = 0
        self.epoch = 0
        self.legs: list[Leg] = []
        self.hold: HeldPages | None = None
        self.exported: tuple[str, HeldPages] | None = None
        self.incoming: HeldPages | None = None
        self.sent = 0
        self.transfers = 0
        self.hands_over_first = False
        self.paused = False
        self.slice_copy: MoveSlices | None = None
        self.slice_move: MoveSlices | None = None
        self.slices_copied = 0

    @property
    def num_known(self) -> int:
        """Number of prompt and output tokens on the host."""
        return self.prompt_len + len(self.output_token_ids)

    @property
    def held_by(self) -> str | None:
        """Name of the instance that has the request's KV between two legs."""
        return self.exported and self.exported[0]

    @property
    def first_token_at(self) -> float | None:
        """Time at which the first token reached the host; None before."""
        times = self.metrics.token_times
        return times[0] if times else None

    @property
    def prompt_tokens_left(self) -> int:
        """Number of prompt tokens that this leg still has to compute."""
        until = self.legs[0].until
        stop = self.prompt_len if until is None else min(until, self.prompt_len)
        return max(stop - self.computed, 0)

    def known_tokens(self, start: int, stop: int) -> list[int]:
        """Return the tokens on the host at positions ``start`` to ``stop``."""
        L = self.prompt_len
        prompt = list(self.prompt_token_ids[start:stop])
        return prompt + self.output_token_ids[max(start - L, 0) : max(stop - L, 0)]

    def page_digests(self, page_size: int, count: int) -> list[bytes]:
        """Return the digests of the first ``count`` pages, all of whose tokens are known.

        The prefix cache uses them. A digest covers the page's tokens and all tokens before them.
        """
        digests = self._digests.get(page_size)
        if digests is None:
            known = self.prompt_digests(page_size) if self.prompt_digests else []
            digests = self._digests[page_size] = known
        for index in range(len(digests), count):
            tokens = self.known_tokens(index * page_size, (index + 1) * page_size)
            before = digests[-1] if digests else b""
            digests.append(blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest())
        return digests[:count]

    def take_history(self, previous: "RequestState") -> None:
        """Begin the prompt with the tokens of the previous turn, up to the prompt's length.

        The prompt keeps its length: if ``previous`` ended early, its own tokens fill the gap.
        """
        self.follows = None
        history = previous.known_tokens(0, min(previous.num_known, self.prompt_len))
        self.prompt_token_ids = [*history, *self.prompt_token_ids[len(history) :]]
        self._digests = {
            size: digests[: len(history) // size] for size, digests in previous._digests.items()
        }

    def known_until(self, leg: Leg) -> int:
        """Return the number of KV entries of the tokens known now, up to the leg's end."""
        known = min(self.num_known, self.peak_tokens)
        return known if leg.until is None else min(known, leg.until)

    @property
    def leg_goal(self) -> int:
        """Number of KV entries up to which this leg may launch now."""
        # The last permitted token needs no KV entry; neither does a token that is not sampled yet.
        goal = self.prompt_len + len(self.output_token_ids) + self.pending
        if goal > self.peak_tokens:
            goal = self.peak_tokens
        until = self.legs[0].until
        return goal if until is None or goal < until else until

    @property
    def leg_is_over(self) -> bool:
        """True if all of this leg's KV entries exist."""
        until = self.legs[0].until
        return until is not None and self.computed >= until

    @property
    def slices(self) -> list[list[int]]:
        """Slices of KV heads in each shard of the instance, or empty.

        Slices that are being moved are listed in two shards.
        """
        hold = self.hold
        if hold is None:
            return []
        if not hold.copies:
            return [list(table) for table in hold.tables]
        return [[*table, *copy] for table, copy in zip(hold.tables, hold.copies, strict=True)]

    def void_kv(self) -> None:
        """Discard all KV entries; steps and transfers in flight become void."""
        self.computed = self.launched = self.pending = self.sent = self.transfers = 0
        self.epoch += 1
        self.hands_over_first = False
        self.drop_incoming()

    def drop_incoming(self) -> None:
        """Give up the pages reserved ahead; entries already sent there become void."""
        if self.incoming:
            self.incoming.release()
            self.incoming, self.sent = None, 0

    def check(self) -> None:
        """Assert the order of the counters."""
        end = self.prompt_len + len(self.output_token_ids) + self.pending
        assert 0 <= self.computed <= self.launched < end, self
        assert self.pending >= 0, self
        assert self.transfers >= 0, self

    def __repr__(self) -> str:
        return (
            f"<{self.id}: computed {self.computed} <= launched {self.launched} < known "
            f"{self.num_known} + pending {self.pending}, epoch {self.epoch}, legs {self.legs}>"
        )
