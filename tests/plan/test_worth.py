"""The worth of a run's work: all of it is what the requests are, and no stretch beats the bound."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from jaxinfer.config.run_file import load_run_file
from jaxinfer.files.shipped import data_path
from jaxinfer.lab.plan.bound import Bound, bound_of
from jaxinfer.lab.plan.worth import WorthDone
from jaxinfer.simulate.run import prepare, serve
from jaxinfer.workload.bench_request import BenchRequest


def run(
    system: str, lengths: list[tuple[int, int]], *settings: str
) -> tuple[WorthDone, Bound, float]:
    """Return the work done, the bound, and the seconds."""
    config = load_run_file(data_path(f"configs/{system}.yaml"), list(settings))
    work = [BenchRequest(None, p, o, 0.0) for p, o in lengths]
    cluster = prepare(config)
    bound = bound_of(cluster, work)
    done = WorthDone(bound)
    made = serve(cluster, work, None, done.add_request, on_step=done.add_step)
    return done, bound, made.wall_s


@given(
    lengths=st.lists(st.tuples(st.integers(1, 900), st.integers(1, 40)), min_size=1, max_size=20),
    pages=st.sampled_from((None, 70)),
)
@examples(20)
def test_all_of_a_run_is_worth_its_requests(
    lengths: list[tuple[int, int]], pages: int | None
) -> None:
    """Hand-offs and preemptions make it no more."""
    settings = [f"instances.low.num_pages={pages}"] if pages else []
    done, _, _ = run("takeover/pair", lengths, *settings)
    assert np.concatenate(done._worths).sum() == pytest.approx(len(lengths))


@given(
    system=st.sampled_from(("takeover/pair", "cronus/data_parallel", "cronus/cronus")),
    low=st.sampled_from(("A10", "L4", "H100-SXM")),
    prompt=st.sampled_from((30, 200, 900)),
    output=st.sampled_from((2, 20, 60)),
    seats=st.sampled_from((4, 64)),
)
@examples(15)
def test_no_steady_part_is_faster_than_the_bound(
    system: str, low: str, prompt: int, output: int, seats: int
) -> None:
    lengths = [(prompt + i % 7, output + i % 5) for i in range(120)]
    done, bound, seconds = run(
        system, lengths, f"groups.low.kind={low}", f"engine.max_num_seqs={seats}"
    )
    assert done.share() <= 1 + 1e-6
    assert len(lengths) / seconds <= bound.rate * (1 + 1e-6)


def test_steps_alike_have_the_share_of_what_they_do() -> None:
    """A seat and steps of a second, one for each request.

    The bound has two instances; one of them has nothing to do here.
    """
    costs = "{step_s: 1.0, token_s: 0.000000001}"
    done, bound, seconds = run(
        "cronus/disaggregated_low_high",
        [(40, 1)] * 50,
        f"simulate.linear={costs}",
        "engine.max_num_seqs=1",
        "instances.prefill.max_num_seqs=1",
    )
    assert bound.rate == pytest.approx(2, rel=1e-3)
    assert seconds == pytest.approx(50, rel=1e-3)
    assert done.share() == pytest.approx(0.5, rel=0.02)
