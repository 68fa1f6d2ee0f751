"""Runs steps on an idle machine to measure how long they take."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from queue import SimpleQueue

from jaxinfer.request import Sampling, SamplingParams
from jaxinfer.runtime.kv.outcome import Failed
from jaxinfer.runtime.processes.pipeline_worker import AnyRemote
from jaxinfer.runtime.worker import Worker
from jaxinfer.serving.batch import Batch, Row
from jaxinfer.serving.features.head_slices import Placement
from jaxinfer.serving.kv_shards import KVShards
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.world import StepDone
from jaxinfer.steps.shapes import StepLimits
from jaxinfer.steps.times import Part, StepPoint


def measure_steps(
    worker: Worker | AnyRemote,
    kv: KVShards,
    limits: StepLimits,
    todo: Iterable[tuple[Part, ...]],
) -> Iterator[StepPoint]:
    """Measure each step once, and the first step of each shape twice; steps are grouped by shape.

    Args:
        kv: empty pools.
    """
    shape = None
    for parts in todo:
        batch = new_batch(kv, parts)
        if shape != (shape := limits.shape_for(batch)):
            # The first run after another shape includes memory allocation, which later runs do not
            # need.
            _run(worker, batch)
        times = _run(worker, batch)
        for row in batch.rows:
            row.hold.release()
        yield StepPoint(parts, times)


def measure_in_a_row(
    worker: Worker | AnyRemote, kv: KVShards, parts: tuple[Part, ...], steps: int
) -> list[float]:
    """Measure a step that is launched several times, each time while the previous run computes.

    Return the seconds of each run. All but the first are therefore the device's time alone; the
    first includes the host's part.

    Args:
        kv: empty pools.
        steps: number of runs.
    """
    batch = new_batch(kv, parts)
    posted: SimpleQueue[StepDone | Failed] = SimpleQueue()
    for _ in range(steps):
        worker.launch(batch, 0.0, posted.put)
    times = [sum(_times(posted)) for _ in range(steps)]
    for row in batch.rows:
        row.hold.release()
    return times


def _run(worker: Worker | AnyRemote, batch: Batch) -> tuple[float, ...]:
    posted: SimpleQueue[StepDone | Failed] = SimpleQueue()
    worker.launch(batch, 0.0, posted.put)
    return _times(posted)


def _times(posted: SimpleQueue[StepDone | Failed]) -> tuple[float, ...]:
    """Return the seconds of each stage of the next finished step."""
    done = posted.get()
    if isinstance(done, Failed):
        raise done.error
    return tuple(end - start for start, end in done.stages)


def new_batch(
    kv: KVShards, parts: Sequence[Part], placements: Iterable[Placement | None] = repeat(None)
) -> Batch:
    """Build a step of made-up requests, and reserve the pages of its rows.

    Args:
        kv: shards with room for the requests.
        placements: placement of each request's slices, see ``KVShards.reserve``.
    """
    rows = []
    for number, ((start, count), placement) in enumerate(zip(parts, placements, strict=False)):
        decodes = count == 1
        request = RequestState(
            f"profile {number}",
            prompt_len=max(start, 1) if decodes else start + count + 1,
            max_tokens=2,
            prompt_token_ids=[0] * (start + count + 1),
            payload=Sampling(SamplingParams(temperature=0), seed=0),
        )
        if decodes:
            request.output_token_ids.append(0)
        hold = kv.reserve(start + count, placement=placement)
        assert hold, (parts, kv.num_free)
        rows.append(Row(request, start, count, decodes, False, 0, hold))
    return Batch("profile", rows, 0, len(rows), 0)
