"""Batches as another process knows them: of random runs, whatever preempts, stops or moves."""

import gc
import pickle
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
from fake_world import FakeWorld
from hypothesis import given
from hypothesis import strategies as st
from properties import examples
from scenarios import LAYOUTS, Chaos, Scenario, scenarios
from serving_checks import make_kv

from jaxinfer.runtime.processes.batch_delta import BatchDecoder, BatchEncoder
from jaxinfer.serving.batch import Batch, Row
from jaxinfer.serving.kv_shards import HeldPages
from jaxinfer.serving.request_state import RequestState


def seen(row: Row) -> tuple[Any, ...]:
    """Return the row's inputs, as a worker builds them."""
    request = row.request
    inputs = None if row.input_pending else request.known_tokens(row.start, row.start + row.count)
    return (
        request.id, request.prompt_len, request.max_tokens, request.payload, request.num_known,
        list(request.prompt_token_ids), request.output_token_ids, inputs,
        row.start, row.count, row.samples, row.input_pending, row.epoch,
        row.hold.tables, row.hold.num_pages,
    )  # fmt: skip


def ints(packed: bytes) -> list[int]:
    """Integers of eight bytes each, as a packed message has them."""
    return list(memoryview(packed).cast("q"))


class Told:
    """An encoder and a decoder of an instance, and how many steps and tokens were told."""

    def __init__(self) -> None:
        self.encoder = BatchEncoder()
        self.decoder: BatchDecoder | None = None
        self.steps = self.tokens = 0

    def check(self, batch: Batch) -> None:
        if self.decoder is None:
            self.decoder = BatchDecoder(len(batch.rows[0].hold.tables))
        told = pickle.loads(pickle.dumps(self.encoder.encode(batch, self.steps, 1.5)))
        assert (told.instance, told.step, told.origin) == (batch.instance, self.steps, 1.5)
        self.steps += 1
        self.tokens += sum(len(tokens) for _, tokens in told.tokens)
        self.tokens += sum(token >= 0 for token in ints(told.rows)[1::7])
        found = self.decoder.decode(told)
        assert [seen(row) for row in found.rows] == [seen(row) for row in batch.rows]
        assert found.work == replace(batch.work, shards=())


@examples(150)
@given(scenarios(), st.integers(0, 2**16), st.integers(0, 20), st.sampled_from(LAYOUTS))
def test_a_mirror_shows_each_batch(
    scenario: Scenario, seed: int, actions: int, layout: tuple[Any, ...]
) -> None:
    """Stages of a real instance that have all their slices together have but one."""
    if layout == ((0, 1), (2, 3)):
        layout = ((0,),)
    instances = [(name, pages, size, layout, o) for name, pages, size, _, o in scenario.instances]
    together = all(pieces == (0,) for pieces in layout)
    caching = scenario.caching and together
    scenario = replace(scenario, instances=instances, caching=caching)
    told: dict[str, Told] = defaultdict(Told)
    launch = FakeWorld.launch

    def tell_and_launch(world: FakeWorld, batch: Batch) -> None:
        told[batch.instance].check(batch)
        launch(world, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeWorld, "launch", tell_and_launch)
        run = scenario.run(Chaos(scenario.by_id, seed, actions, scenario.caching))
        run.verify()
    for here in told.values():
        # Each output token is told to an instance once, whatever becomes of the request.
        assert here.tokens <= sum(len(request.output_token_ids) for request in run.requests)


def one_row(name: str, hold: HeldPages, count: int) -> Batch:
    request = RequestState(name, 40, 4, prompt_token_ids=range(40))
    return Batch("a", [Row(request, 0, count, False, False, 0, hold)], 0, 1, 0)


def test_a_page_a_token_and_a_prompt_are_told_once() -> None:
    kv = make_kv(10, 4)
    hold = kv.reserve(5)
    assert hold
    batch = one_row("r", hold, 5)
    request = batch.rows[0].request
    encoder = BatchEncoder()
    first = encoder.encode(batch, 0, 0.0)
    assert first.new == [(0, "r", 40, 4, range(40), None)]
    table = hold.tables[0][0]
    assert ints(first.rows) == [0, -1, 0, 5, False, False, 0]
    assert first.pages == [(0, 0, [table])]
    assert encoder.encode(batch, 1, 0.0) == ("a", 1, 0.0, [], [], [], first.rows, [], [])
    hold.grow(9)
    request.output_token_ids += [7, 8]
    told = encoder.encode(batch, 2, 0.0)
    assert told.tokens == [(0, [7, 8])]
    assert (told.rows, told.pages) == (first.rows, [(0, 2, [table[2:]])])
    request.output_token_ids += [9]
    told = encoder.encode(batch, 2, 0.0)
    assert (told.tokens, ints(told.rows)) == ([], [0, 9, 0, 5, False, False, 0])
    # After a preemption, other pages: all of them.
    batch.rows[0].hold = other = kv.reserve(3)
    assert other
    again = encoder.encode(batch, 3, 0.0)
    assert (again.tokens, again.rows) == ([], first.rows)
    assert again.pages == [(0, 0, [other.tables[0][0]])]


def test_slices_that_have_moved_are_told_anew() -> None:
    """Also one that has gone and come back between two steps; halves are told by their rows."""
    kv = make_kv(40, 4, ((0, 1), ()))
    holds = [kv.reserve(n, placement=[[0], [1]]) for n in (5, 3)]
    batch = one_row("r", holds[0], 5)  # type: ignore[arg-type]
    other = one_row("s", holds[1], 3)  # type: ignore[arg-type]
    batch.rows += other.rows
    encoder, decoder = BatchEncoder(), BatchDecoder(2)

    def tell() -> dict[int, Any]:
        told = encoder.encode(batch, 0, 0.0)
        found = decoder.decode(told)
        for there, here in zip(found.rows, batch.rows, strict=True):
            assert there.hold.tables == here.hold.tables
            assert there.hold.num_pages == here.hold.num_pages
        return {number: new for number, _, new in told.pages}

    hold = batch.rows[0].hold
    first = [{0: hold.tables[0][0]}, {1: hold.tables[1][1]}]
    assert tell()[0] == first
    assert tell() == {}
    for source, dest in ((0, 1), (1, 0)):
        assert hold.copy_slices([(source, dest, (0,))])
        hold.take_copies([(source, dest, (0,))])
    assert tell() == {0: [*hold.tables]}
    batch.halves = batch.rows[1:], batch.rows[:1]
    found = decoder.decode(encoder.encode(batch, 0, 0.0))
    assert [[found.rows.index(row) for row in half] for half in found.halves] == [[1], [0]]


def test_what_nobody_has_any_more_is_forgotten() -> None:
    kv = make_kv(10, 4)
    hold = kv.reserve(5)
    assert hold
    encoder, decoder = BatchEncoder(), BatchDecoder(1)
    batches = [one_row(name, hold, 5) for name in "xyz"]
    for step, batch in enumerate(batches):
        decoder.decode(encoder.encode(batch, step, 0.0))
    assert list(decoder._requests) == list(decoder._pages) == [0, 1, 2]
    batch = batches[2]
    batches.clear()
    gc.collect()
    told = encoder.encode(batch, 3, 0.0)
    assert sorted(told.gone) == [0, 1]
    decoder.decode(told)
    assert list(decoder._requests) == list(decoder._pages) == [2]
    assert encoder.encode(batch, 4, 0.0).gone == []
