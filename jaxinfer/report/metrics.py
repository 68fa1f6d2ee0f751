"""Figures of a run, from its requests and its steps."""

import math
import resource
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from jaxinfer.hardware.efficiency import Efficiency
from jaxinfer.report.latencies import Latencies, LatencyTotals
from jaxinfer.report.steady_rate import SteadyRate
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.world import StepDone

# As many changes of pages in use are kept until they are brought into the order of time.
_NOTES = 2**16


@dataclass(slots=True)
class InstanceTotals:
    """Totals over an instance's steps so far. Times are in seconds since the run began.

    Attributes:
        first_step: start of the first step.
        last_step: end of the last step.
        busy_s: time in which some step ran.
        pages_in_use: pages in use at the launch of the last step that
            ``RunTotals.pages_in_use`` includes.
        pages_noted: pages in use at the launch of the last step of all.
    """

    first_step: float
    last_step: float
    busy_s: float = 0.0
    pages_in_use: int = 0
    pages_noted: int = 0


@dataclass
class RunTotals:
    """Sums over the steps and the prompts that have ended so far, in bounded memory.

    Attributes:
        slice_bytes: bytes of KV moved between shards of one instance.
        prefill_tokens: number of computed prompt tokens, including recomputed ones.
        decode_tokens: number of computed decode tokens, including recomputed ones.
        pairs: number of pairs of a computed token and a KV entry that it sees.
        instances: instances that have had a step.
        pages_in_use: pages in use of all instances together, each counted when its last step was
            launched; ``count_pages`` brings it up to date.
        peak_pages: largest value of ``pages_in_use``; steps that end at one time count together.
        prompt_tokens, cached_tokens, output_tokens, latencies: values of prompts that have not
            failed; see ``RunMetrics``.
    """

    steps: int = 0
    slice_bytes: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    pairs: float = 0.0
    instances: dict[str, InstanceTotals] = field(default_factory=dict)
    pages_in_use: int = 0
    peak_pages: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    latencies: LatencyTotals = field(default_factory=LatencyTotals)
    course: SteadyRate = field(default_factory=SteadyRate)
    _pages_at: float = 0.0
    # Ends of steps, their instances, and the pages in use when they were launched; not by time.
    _notes: list[tuple[float, InstanceTotals, int]] = field(default_factory=list)

    def add_step(self, done: StepDone) -> None:
        """Count one step."""
        batch, start, end = done.batch, done.start, done.end
        work, pages = batch.work, batch.pages_in_use
        if work.chunks:
            self.pairs += work.pairs
        self.prefill_tokens += work.tokens - work.decodes
        self.steps += 1
        self.decode_tokens += work.decodes
        self.pairs += work.single_context
        totals = self.instances.get(batch.instance)
        if totals is None:
            totals = self.instances[batch.instance] = InstanceTotals(start, start)
        # Steps of one instance end in the order of their starts; stages compute several at once.
        last = totals.last_step
        totals.busy_s += end - (start if start > last else last)
        totals.last_step = end
        if pages != totals.pages_noted:
            totals.pages_noted = pages
            self._notes.append((end, totals, pages))
            if len(self._notes) > _NOTES:
                self.count_pages(end)

    def add_run(
        self,
        instance: str,
        start: float,
        ends: Sequence[float],
        decodes: int,
        context: int,
        pages: int,
        changes: Iterable[tuple[float, int]] = (),
    ) -> None:
        """Count successive steps of the same decodes.

        Steps of other instances that end earlier may be counted later.

        Args:
            start: start of the first step, whose decodes see ``context`` KV entries.
            pages: pages in use when the first step was launched.
            changes: ends of later steps, each with the pages in use when it was launched.
        """
        # Most of a simulation's steps are counted here, so it is written for speed.
        count = len(ends)
        self.steps += count
        self.decode_tokens += count * decodes
        self.pairs += count * context + decodes * (count * (count - 1) // 2)
        totals = self.instances[instance]
        last, busy_s = totals.last_step, totals.busy_s
        if start > last:
            last = start
        for end in ends:
            busy_s += end - last
            last = end
        totals.last_step, totals.busy_s = last, busy_s
        if pages != totals.pages_noted:
            totals.pages_noted = pages
            self._notes.append((ends[0], totals, pages))
        for end, used in changes:
            totals.pages_noted = used
            self._notes.append((end, totals, used))

    def count_pages(self, until: float = math.inf) -> None:
        """Update ``pages_in_use`` and ``peak_pages`` with all steps that end by ``until``."""
        notes, self._notes = sorted(self._notes, key=itemgetter(0)), []
        for number, (end, totals, pages) in enumerate(notes):
            if end > until:
                self._notes = notes[number:]
                break
            if end != self._pages_at:
                self._pages_at = end
                self.peak_pages = max(self.peak_pages, self.pages_in_use)
            self.pages_in_use += pages - totals.pages_in_use
            totals.pages_in_use = pages
        if until == math.inf:
            self.peak_pages = max(self.peak_pages, self.pages_in_use)

    def lose_instance(self, name: str) -> None:
        """Stop counting the pages of a lost instance."""
        self.count_pages()
        if totals := self.instances.get(name):
            self.pages_in_use -= totals.pages_in_use
            totals.pages_in_use = totals.pages_noted = 0

    def add_prompt(self, ended: Sequence[tuple[RequestState, Sequence[float]]]) -> None:
        """Count one prompt with all its continuations and the times of their tokens."""
        if any(request.error is not None for request, _ in ended):
            return
        outputs, end = 0, None
        for request, times in ended:
            metrics = request.metrics
            self.prompt_tokens += request.prompt_len
            self.cached_tokens += metrics.num_cached_tokens or 0
            outputs += len(request.output_token_ids)
            if times:
                self.latencies.add(request.arrival, metrics.first_scheduled, times)
                end = times[-1] if end is None else max(end, times[-1])
        self.output_tokens += outputs
        if end is not None:
            self.course.add(end, outputs)


@dataclass(kw_only=True)
class InstanceUse:
    """The use of one instance's time, in seconds since the run began.

    Attributes:
        first_step: start of the first step; None without steps.
        last_step: end of the last step; None without steps.
        busy_s: time in which some step ran.
        role_s: role -> time in it; time without a role is left out.
    """

    first_step: float | None
    last_step: float | None
    busy_s: float
    role_s: Mapping[str, float]


@dataclass(kw_only=True)
class SliceMoveCounts:
    """Moves of KV heads of running requests from one device group to others.

    Attributes:
        begun: number of moves for which there was room.
        num_bytes: bytes of the moves that have landed.
        without_room: number of moves left out because a shard had no room.
        at_once: number of moves left out because another one of the request was under way.
    """

    begun: int
    num_bytes: int
    without_room: int
    at_once: int


@dataclass(kw_only=True)
class RunMetrics(Latencies):
    """The figures of a run. Times are in seconds, without loading and compiling ahead.

    A request is a prompt with all its ``n`` continuations. It has failed if one of them has, and
    ends with the last of them. Latencies are those of each continuation.

    Attributes:
        requests: number of requests.
        failed: number of requests that failed.
        prompt_tokens: number of prompt tokens, counted for each of a prompt's ``n`` continuations.
        cached_tokens: those of them whose KV the prefix cache had when their request started.
        prompt_tok_s, output_tok_s: tokens of finished requests per second of the whole run.
        steady_requests_s, steady_output_tok_s: finished requests and their output tokens per
            second, without the run's beginning and end (see ``SteadyRate.steady``); None for short
            runs.
        instances: use of each instance, by name.
        mfu: the model's FLOPs for all computed tokens, divided by the FLOPs that the GPUs could
            compute in the whole run at their peak (Chowdhery et al., PaLM, 2022, appendix B; but
            recomputed tokens count); None if unknown.
        usd_per_request, usd_per_million_output_tokens: price of the machines for the whole run;
            None if a price is unknown.
        wh_per_request, wh_per_million_output_tokens: watt-hours for the whole run at the GPUs'
            power limit: an upper bound.
        slice_moves: moves of KV heads; None if no instance has KV heads on several groups.
        peak_pages: largest number of KV pages in use.
        num_pages: size of the pools of instances that compute, without their padding pages.
        compiles, compile_s: number and seconds of compiles, before and during the run.
        late_compiles: number of compiles during the run.
        beyond: for a modelled run with extrapolated times: by instance and quantity, the largest
            value of a step and the largest measured value.
        loop_s: time of the serving loop's own Python code, within ``wall_s``.
        launching_s: time of building and launching steps, within ``wall_s``.
        peak_rss_mib: peak memory of the process on the host.
    """

    requests: int
    failed: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    wall_s: float
    prompt_tok_s: float
    output_tok_s: float
    steady_requests_s: float | None = None
    steady_output_tok_s: float | None = None
    instances: Mapping[str, InstanceUse] = field(default_factory=dict)
    mfu: float | None = None
    usd_per_request: float | None = None
    usd_per_million_output_tokens: float | None = None
    wh_per_request: float | None = None
    wh_per_million_output_tokens: float | None = None
    steps: int
    preemptions: int
    slice_moves: SliceMoveCounts | None = None
    beyond: Mapping[str, Mapping[str, tuple[float, float]]] = field(default_factory=dict)
    peak_pages: int
    num_pages: int
    compiles: int
    compile_s: float
    late_compiles: int
    loop_s: float
    launching_s: float
    peak_rss_mib: float = field(default_factory=lambda: peak_rss_mib())


def run_metrics(
    totals: RunTotals,
    requests: int,
    failed: int,
    wall_s: float,
    role_s: Mapping[str, Mapping[str, float]] | None = None,
    efficiency: Efficiency | None = None,
    **given: Any,
) -> RunMetrics:
    """Return the figures of a run that has ended.

    Args:
        requests: see ``RunMetrics``.
        failed: see ``RunMetrics``.
        role_s: seconds that each instance spent in each role.
        efficiency: what is known of the model's FLOPs and the GPUs' peak, price and power.
        given: fields of ``RunMetrics`` that do not follow from requests and steps.
    """
    totals.count_pages()
    steady = totals.course.steady()
    known = efficiency or Efficiency()
    tokens = totals.prefill_tokens + totals.decode_tokens
    served = requests - failed
    return RunMetrics(
        requests=requests,
        failed=failed,
        prompt_tokens=totals.prompt_tokens,
        output_tokens=totals.output_tokens,
        cached_tokens=totals.cached_tokens,
        wall_s=wall_s,
        prompt_tok_s=totals.prompt_tokens / wall_s,
        output_tok_s=totals.output_tokens / wall_s,
        steady_requests_s=steady[0] if steady else None,
        steady_output_tok_s=steady[1] if steady else None,
        instances=_uses(totals, role_s or {}),
        mfu=known.mfu(tokens, totals.pairs, totals.output_tokens, wall_s),
        usd_per_request=_each(known.usd(wall_s), served),
        usd_per_million_output_tokens=_each(known.usd(wall_s), totals.output_tokens / 1e6),
        wh_per_request=_each(known.watt_hours(wall_s), served),
        wh_per_million_output_tokens=_each(known.watt_hours(wall_s), totals.output_tokens / 1e6),
        steps=totals.steps,
        peak_pages=totals.peak_pages,
        **(given | totals.latencies.figures()),
    )


def _each(total: float | None, count: float) -> float | None:
    return None if total is None or not count else total / count


def _uses(totals: RunTotals, role_s: Mapping[str, Mapping[str, float]]) -> dict[str, InstanceUse]:
    uses = {}
    for name in dict.fromkeys([*role_s, *totals.instances]):
        steps = totals.instances.get(name)
        uses[name] = InstanceUse(
            first_step=steps.first_step if steps else None,
            last_step=steps.last_step if steps else None,
            busy_s=steps.busy_s if steps else 0.0,
            role_s={role: s for role, s in role_s.get(name, {}).items() if role},
        )
    return uses


def peak_rss_mib() -> float:
    """Return the peak resident memory of this process, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
