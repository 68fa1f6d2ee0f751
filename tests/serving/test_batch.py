"""Work of a step, counted by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples
from serving_checks import make_kv

from jaxinfer.serving.batch import Batch, Row, Work, work_of
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.world import InstanceLost, StepDone


def row(start: int, count: int, samples: bool, prompt_len: int = 10) -> Row:
    hold = make_kv(99, 4).reserve(1)
    assert hold
    return Row(RequestState("x", prompt_len, 50), start, count, samples, False, 0, hold)


ROWS = [
    row(10, 1, True),  # The first decode: it sees eleven entries.
    row(30, 1, True),
    row(9, 1, True),  # A prompt's last token by itself.
    row(3, 1, False),
    row(0, 10, True),
    row(4, 2, False),
]


def test_counts() -> None:
    assert work_of(ROWS) == Work(
        tokens=16,
        singles=4,
        sequences=6,
        sampled=4,
        single_context=11 + 31 + 10 + 4,
        chunks=[(0, 10), (4, 2)],
        decodes=2,
    )
    assert work_of([]) == Work(0, 0, 0, 0, 0, [], 0)


def test_decodes_without_rows() -> None:
    assert work_of(ROWS[4:], 3, 100) == Work(15, 3, 5, 4, 100, [(0, 10), (4, 2)], 3)
    batch = Batch("A", ROWS[:1], 0, 1, 5, 3, 100)
    assert batch.work == Work(4, 4, 4, 4, 111, [], 4)
    assert Batch("A", ROWS[:1], 0, 1, 5).work == Work(1, 1, 1, 1, 11, [], 1)


def test_pairs_of_a_token_and_an_entry_that_it_sees() -> None:
    # 1 + 2 + ... + 10, and 5 + 6.
    assert work_of(ROWS).pairs == 55 + 11


@examples(50)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(2, 30))))
def test_pairs_one_by_one(chunks: list[tuple[int, int]]) -> None:
    work = Work(0, 0, 0, 0, 0, chunks)
    assert work.pairs == sum(start + i for start, count in chunks for i in range(1, count + 1))


@pytest.mark.parametrize("instance", ["A", "B"])
def test_a_step_names_its_instance_and_rows(instance: str) -> None:
    done = StepDone(Batch(instance, ROWS, 0, 1, 5), [], 0.0, 1.0)
    assert (done.instance, done.rows) == (instance, ROWS)
    assert (done.logprobs, done.details, done.prompt_details, done.stages) == ((), (), {}, ())
    assert InstanceLost(instance, "killed").reason == "killed"
