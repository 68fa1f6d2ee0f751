"""Closed loops for real, on the tiny model: who comes when, and what waits for too much."""

from pathlib import Path
from typing import Any

import pytest

from jaxinfer import LLM, JaxinferError, RequestOutput, SamplingParams
from jaxinfer.config.run_file import as_run_file
from jaxinfer.lab.measure import measure
from jaxinfer.report.records import read_run


@pytest.mark.parametrize(("concurrency", "think_s"), [(1, 0.0), (3, 0.0), (3, 0.02), (9, 0.0)])
def test_one_comes_when_one_ends(
    tiny: LLM, tmp_path: Path, concurrency: int, think_s: float
) -> None:
    """The loop's time is all between a step's end and the next arrival, and no more requests."""
    count = 12
    workload = {
        "synthetic": {
            "input_len": 9,
            "output_len": {"kind": "uniform", "min": 1, "max": 12},
            "count": count,
        },
        "arrivals": {"kind": "closed", "concurrency": concurrency, "think_s": think_s},
    }
    work = as_run_file({"workload": workload}).requests()
    measure(tiny, work, "workload", str(tmp_path), progress=False)
    found = read_run(tmp_path / "1").requests
    assert len(found) == count
    arrivals = sorted(request.arrival for request in found)
    ends = sorted(request.token_times[-1] for request in found)
    first = min(concurrency, count)
    assert arrivals[:first] == [0.0] * first
    for arrival, end in zip(arrivals[first:], ends, strict=False):
        assert arrival >= end + think_s
    for request in found:
        # Those that arrived before it and have not ended: it is one of at most so many.
        there = sum(other.arrival <= request.arrival < other.token_times[-1] for other in found)
        assert there <= concurrency


def test_continuations_of_a_prompt_end_together(tiny: LLM) -> None:
    """A prompt that waits for an end waits for all of another, and brings its own continuations."""
    order: list[str] = []
    requests = []
    for name, after, n in (("a", 0, 2), ("b", 1, 3), ("c", 2, 1)):
        params = SamplingParams(n=n, temperature=1.0, max_tokens=4, ignore_eos=True)
        made = tiny.make_requests(name, list(range(1, 20)), params)
        for request in made:
            request.after_ends = after
        requests += made

    def note(output: RequestOutput) -> None:
        assert not output.error
        assert all(len(each.token_ids) == 4 for each in output.outputs)
        order.append(output.request_id)

    tiny.run(requests, note, progress=False)
    assert order == ["a", "b", "c"]
    ends = {request.id: request.metrics.token_times[-1] for request in requests}
    for request in requests[2:]:
        before = max(end for id, end in ends.items() if id[0] < request.id[0])
        assert request.metrics.arrival >= before


def test_a_stream_that_is_read_as_there_is_room(tiny: LLM) -> None:
    """A request whose ends have come already is taken when it is read."""
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)

    def stream() -> Any:
        for number in range(60):
            (request,) = tiny.make_requests(str(number), [1, 2, 3], params)
            request.after_ends = max(number - 1, 0)
            yield request

    came: list[str] = []
    tiny.run(stream(), lambda output: came.append(output.request_id), progress=False)
    assert sorted(map(int, came)) == list(range(60))


def test_ends_that_never_come(tiny: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    requests = [tiny.make_requests(name, [1, 2, 3], params)[0] for name in "ab"]
    requests[1].after_ends = 2
    with pytest.raises(JaxinferError, match="waits for the ends of more requests than there are"):
        tiny.run(requests, lambda output: None, progress=False)
