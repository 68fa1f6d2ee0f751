"""Hands KV over between all pairs of sides; checks its arrival, rounding and the next tokens."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from queue import SimpleQueue
from typing import Any

import jax
import numpy as np

from jaxinfer.checkpoints.open_tensors import Checkpoint
from jaxinfer.config.cluster import ClusterConfig
from jaxinfer.errors import JaxinferError
from jaxinfer.lab.conformance import check
from jaxinfer.lab.hand_offs.golden import REQUEST, GoldenEnd, golden_model
from jaxinfer.lab.hand_offs.sides import HandOffSide
from jaxinfer.request import Sampling, SamplingParams
from jaxinfer.runtime.cluster import Cluster, Engine, connect, load_cluster
from jaxinfer.runtime.kv.channel import Channel, Landed
from jaxinfer.runtime.kv.kv_endpoint import ThisProcess
from jaxinfer.runtime.kv.kv_entries import allowed_change, compare_entries, read_entries
from jaxinfer.runtime.kv.outcome import Failed
from jaxinfer.runtime.kv.slab import SLAB_TOKENS
from jaxinfer.runtime.processes.process_group import Progress
from jaxinfer.runtime.stage.cluster_plan import plan_cluster
from jaxinfer.runtime.stage.devices import count_cpu_devices
from jaxinfer.runtime.stage.stage import Stage
from jaxinfer.serving.batch import Batch, Row, Transfer
from jaxinfer.serving.kv_shards import HeldPages
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.world import StepDone

# Number of tokens of a step with prefill.
CHUNK = 64
# The first transfer includes set-up; of the others, the fastest counts.
TRANSFERS = 3


@dataclass(frozen=True)
class HandOffCheck:
    """The outcome of a hand-off between a pair of sides.

    Attributes:
        verdict: ``exact`` if every bit of every entry is equal, ``rounds`` if changes are within
            what the formats allow, ``wrong`` if not, or ``refused``.
        max_change: see ``compare_entries``.
        rms_change: see ``compare_entries``.
        bound: see ``compare_entries``.
        reason: reason for a refusal, or what was left out.
        same_tokens: number of first greedy tokens that equal the reference's.
        logprob_change: largest difference of the log probability over those tokens.
        num_bytes: size of the prompt's KV.
        seconds: time to send the prompt's KV.
        fault: the conformance kit's name for a wrong hand-off.
        base: number of the prompt's first tokens that a second hand-off left out, because the
            destination had them; 0 if there was none.
    """

    source: str
    dest: str
    verdict: str
    reason: str = ""
    max_change: float | None = None
    rms_change: float | None = None
    bound: float | None = None
    same_tokens: int | None = None
    logprob_change: float | None = None
    num_bytes: int | None = None
    seconds: float | None = None
    fault: str = ""
    base: int = 0


@dataclass
class _Prompt:
    """A request on one side, with the tokens sampled so far."""

    request: RequestState
    hold: HeldPages
    logprobs: list[float] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.request.output_token_ids


class Conformance:
    """Loads the sides as instances of one model, each on its own devices, and tries all pairs.

    Args:
        sides: sides by name; the first one is the reference, to whose tokens all others are
            compared.
        prompt: token ids of the prompt.
        outputs: number of tokens to sample.

    Attributes:
        refused: reasons for the sides that cannot be loaded.
        left_out: reason why no golden entries are handed over; "" if some are.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        sides: Mapping[str, HandOffSide],
        prompt: Sequence[int],
        outputs: int,
        progress: Progress,
        load_format: str = "auto",
    ) -> None:
        self.sides = sides
        self._prompt, self._outputs = list(prompt), outputs
        self._layers, self._load_format = checkpoint.config.num_hidden_layers, load_format
        self.refused: dict[str, str] = {}
        self._check(self._config)
        # JAX counts devices only once.
        count_cpu_devices([self._config(self._able)])
        self._check(lambda side: plan_cluster(checkpoint.config, self._config(side)))
        if not self._able:
            raise JaxinferError(
                f"none of the configurations can be loaded: {next(iter(self.refused.values()))}"
            )
        self._all = self._config(self._able)
        self._cluster: Cluster = load_cluster(checkpoint, self._all, progress)
        self._kv = {name: engine.new_kv() for name, engine in self._cluster.engines.items()}
        held = [_stages(engine) for engine in self._cluster.engines.values()]
        self._golden_model, self.left_out = golden_model(held)

    @property
    def _able(self) -> dict[str, HandOffSide]:
        return {name: side for name, side in self.sides.items() if name not in self.refused}

    def _check(self, try_out: Callable[[dict[str, HandOffSide]], object]) -> None:
        """Record each side that cannot be loaded."""
        for name, side in self._able.items():
            try:
                try_out({name: side})
            except JaxinferError as error:
                self.refused[name] = str(error)

    def _config(self, sides: Mapping[str, HandOffSide]) -> ClusterConfig:
        total = len(self._prompt) + self._outputs
        groups, instances = {}, {}
        for name, side in sides.items():
            groups[name], instance = side.sections(name, self._layers)
            instances[name] = instance | {
                # Pages of two requests, and the padding page.
                "num_pages": 2 * -(-total // side.page_size) + 1,
                "max_num_seqs": 1,
                "max_num_batched_tokens": CHUNK,
                "token_buckets": [CHUNK],
                "max_model_len": total,
                "enable_prefix_caching": False,
                "launch_ahead": False,
                "load_format": self._load_format,
            }
        return ClusterConfig.model_validate({"groups": groups, "instances": instances})

    def outcomes(self) -> Iterator[HandOffCheck]:
        """Yield the outcome of each pair of sides, also of equal ones, in the sides' order."""
        engines = self._cluster.engines
        # This comes first, because golden entries fill whole pools.
        faults = {pair: self._golden_fault(*pair) for pair in product(engines, engines)}
        reference = self._alone(next(iter(engines)))
        for source in self.sides:
            sent = self._prefill(source) if source in engines else None
            for dest in self.sides:
                refused = [name for name in (source, dest) if name in self.refused]
                if refused or sent is None:
                    yield HandOffCheck(source, dest, "refused", self.refused[refused[0]])
                    continue
                try:
                    outcome = self._pair(source, dest, sent, reference)
                    if fault := faults[source, dest]:
                        outcome = replace(outcome, verdict="wrong", fault=fault)
                    base = 0 if self.left_out else self._base(dest)
                    yield replace(outcome, reason=self.left_out, base=base)
                except JaxinferError as error:
                    yield HandOffCheck(source, dest, "refused", str(error))
            if sent:
                sent.hold.release()

    def _golden_fault(self, source: str, dest: str) -> str:
        """Hand over all entries, then those after a base that the destination has."""
        try:
            if whole := self.fault_of(source, dest):
                return whole
            base = self._base(dest)
            found = self.fault_of(source, dest, base) if base else ""
            return found and f"without the first {base} tokens: {found}"
        except JaxinferError as error:
            return f"golden entries are refused: {error}"

    def _base(self, dest: str) -> int:
        """Return half of the pages that end before the prompt's last token, in tokens."""
        size = self._cluster.engines[dest].plan.limits.page_size
        pages = (len(self._prompt) - 1) // size
        return -(-pages // 2) * size

    def fault_of(self, source: str, dest: str, base: int = 0) -> str:
        """Hand over golden entries; return a description of the fault on arrival, or "".

        Args:
            base: number of first tokens that the destination has already, and that are not sent.

        Raises:
            JaxinferError: the hand-off is refused.
        """
        engines, length = self._cluster.engines, len(self._prompt)
        stages = {name: _stages(engines[name]) for name in (source, dest)}
        model = self._golden_model
        if model is None:
            return ""
        holds = [self._reserve(name) for name in (source, dest)]
        given, taken = (
            GoldenEnd(model, stages[name], hold.tables[0][0], length, number)
            for number, (name, hold) in enumerate(zip((source, dest), holds, strict=True))
        )
        here = ThisProcess(stages)
        try:
            channel = connect(self._all, (engines[source], engines[dest]), (here, here))
            request = _request(self._prompt, self._outputs)
            given.side.fill(REQUEST)
            if source == dest:
                taken.side.take_pages(given.side, REQUEST)
            if base:
                taken.side.write(REQUEST, holds[1].tables[0][0], 0, base)
            before = taken.side.copy()
            given.write()
            taken.write()
            transfer = Transfer(request, 0, source, dest, holds[0], holds[1], base, length, 0.0)
            self._send(channel, engines[dest], _Prompt(request, holds[0]), transfer)
            taken.read()
        finally:
            here.close()
            for hold in holds:
                hold.release()
        wire = channel.pairs[0].form.dtype.name
        found = check(
            given.side,
            taken.side,
            [REQUEST],
            before=before,
            cached={REQUEST: base},
            wire=wire,
            slab_tokens=SLAB_TOKENS,
        )
        return str(found[0]) if found else ""

    def _alone(self, name: str) -> _Prompt:
        done = self._prefill(name)
        self._decode(name, done)
        done.hold.release()
        return done

    def _pair(self, source: str, dest: str, sent: _Prompt, reference: _Prompt) -> HandOffCheck:
        engines = self._cluster.engines
        here = ThisProcess({name: _stages(engines[name]) for name in (source, dest)})
        try:
            channel = connect(self._all, (engines[source], engines[dest]), (here, here))
            channel.probe(f"{source} -> {dest}")
            hold = self._reserve(dest)
            seconds = min(
                self._send(
                    channel,
                    engines[dest],
                    sent,
                    Transfer(
                        sent.request, 0, source, dest, sent.hold, hold, 0, len(self._prompt), 0.0
                    ),
                )
                for _ in range(TRANSFERS)
            )
        finally:
            here.close()
        form = channel.pairs[0].form
        before, after = (
            read_entries(_stages(engines[name]), [t[0] for t in h.tables], len(self._prompt))
            for name, h in ((source, sent.hold), (dest, hold))
        )
        there = engines[dest].plan
        allowed = allowed_change(before, form.dtype, there.kv_dtype, there.limits.page_size)
        found = compare_entries(before, after, allowed)
        going_on = _Prompt(_request(self._prompt, self._outputs), hold, sent.logprobs[:1])
        going_on.tokens.extend(sent.tokens[:1])
        self._decode(dest, going_on)
        hold.release()
        same = _same(going_on.tokens, reference.tokens)
        apart = [
            abs(a - b)
            for a, b in zip(going_on.logprobs[:same], reference.logprobs[:same], strict=True)
        ]
        verdict = "rounds" if np.any(before != after) else "exact"
        return HandOffCheck(
            source, dest, verdict if found["beyond"] <= 0 else "wrong", "",
            found["max_change"], found["rms_change"], found["bound"],
            same, max(apart, default=None), channel.token_bytes * len(self._prompt), seconds,
        )  # fmt: skip

    def _send(self, channel: Channel, dest: Engine, sent: _Prompt, transfer: Transfer) -> float:
        """Return the seconds until the KV is in the destination's pages."""
        landed: SimpleQueue[Landed | Failed] = SimpleQueue()
        jax.block_until_ready([stage.kv for stage in _stages(dest)])
        start = time.perf_counter()
        channel.send(transfer, landed.put)
        for _ in range(channel.num_slabs(transfer)):
            channel.place(_unless_failed(landed.get()))
        jax.block_until_ready([stage.kv for stage in _stages(dest)])
        return time.perf_counter() - start

    def _reserve(self, name: str) -> HeldPages:
        hold = self._kv[name].reserve(len(self._prompt) + self._outputs)
        assert hold, "pools hold two requests"
        return hold

    def _prefill(self, name: str) -> _Prompt:
        """Compute the prompt on one side, in chunks, and the first token."""
        done = _Prompt(_request(self._prompt, self._outputs), self._reserve(name))
        for start in range(0, len(self._prompt), CHUNK):
            count = min(CHUNK, len(self._prompt) - start)
            self._step(name, done, start, count, start + count == len(self._prompt))
        return done

    def _decode(self, name: str, done: _Prompt) -> None:
        while len(done.tokens) < self._outputs:
            self._step(name, done, len(self._prompt) + len(done.tokens) - 1, 1, samples=True)

    def _step(self, name: str, done: _Prompt, start: int, count: int, samples: bool) -> None:
        posted: SimpleQueue[StepDone | Failed] = SimpleQueue()
        row = Row(done.request, start, count, samples, False, 0, done.hold)
        self._cluster.engines[name].worker.launch(Batch(name, [row], 0, 1, 0), 0.0, posted.put)
        ended = _unless_failed(posted.get())
        done.tokens.extend(ended.tokens)
        done.logprobs.extend(ended.logprobs)


def _unless_failed(posted: Any) -> Any:
    if isinstance(posted, Failed):
        raise posted.error
    return posted


def _request(prompt: list[int], outputs: int) -> RequestState:
    payload = Sampling(SamplingParams(temperature=0), seed=0)
    return RequestState(
        "conformance", len(prompt), outputs, prompt_token_ids=prompt, payload=payload
    )


def _stages(engine: Engine) -> list[Stage]:
    stages = engine.worker.stages
    assert all(isinstance(stage, Stage) for stage in stages), "all in this process"
    return list(stages)  # type: ignore[arg-type]


def _same(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Count the equal tokens from the start."""
    both = zip(tokens, others, strict=True)
    return next((i for i, (a, b) in enumerate(both) if a != b), len(tokens))
