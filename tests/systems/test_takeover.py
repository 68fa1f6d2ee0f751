"""Takeover: where requests begin and who takes them over, on the fake executor with losses."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples
from scenarios import Scenario, scenarios
from schedules import pool, unit
from serving_checks import Outcome, Run, make_requests

from jaxinfer.lab.plan.bound import bound_of
from jaxinfer.papers.takeover.accounts import Account, InstanceClass
from jaxinfer.papers.takeover.slo import Slo
from jaxinfer.papers.takeover.speeds import Speeds
from jaxinfer.papers.takeover.system import Takeover, TakeoverOptions
from jaxinfer.papers.takeover.takes import Takes
from jaxinfer.serving.instance import Instance
from jaxinfer.serving.step_fit import DecodeFit, MixedFit, PrefillFit, StepFit
from jaxinfer.serving.system import Action, Assignment, Budget, Reassign
from jaxinfer.serving.views import ClusterView, RequestView, StepView
from jaxinfer.simulate.run import prepare, simulate
from jaxinfer.workload.lengths import BenchRequest
from scripts.reproduce.takeover import cases


def fit(token_s: float, sequence_s: float = 0.0, entry_s: float = 0.0, step_s: float = 1.0) -> Any:
    """A prompt's token, and a decode beside others."""
    mixed = MixedFit(0.0, entry_s, step_s + 4 * token_s)
    return StepFit(PrefillFit(token_s, 0.0), mixed, DecodeFit(entry_s, sequence_s, step_s))


# The smaller pool's decodes displace more.
FAST, SLOW = fit(0.1, step_s=1.0), fit(0.4, 0.4, 0.4, step_s=4.0)


@pytest.mark.parametrize(
    ("speeds", "at"),
    [
        # By hand, of Llama 3 8B: 1 + (sequence + context * entry) / token, in microseconds.
        ((92, 72, 0.113), {300: 2.15, 1100: 3.13, 4000: 6.70}),  # A100
        ((258, 72, 0.385), {300: 1.73, 1100: 2.92, 4000: 7.25}),  # A10
        ((29, 72, 0.069), {300: 4.20, 1100: 6.10, 4000: 13.00}),  # H100
        ((79, 72, 0.268), {300: 2.93, 1100: 5.64, 4000: 15.48}),  # L40S
    ],
)
def test_what_a_decode_displaces(speeds: tuple[float, ...], at: dict[int, float]) -> None:
    token, sequence, entry = (1e-6 * each for each in speeds)
    found = Speeds.of(fit(token, sequence, entry))
    for context, tokens in at.items():
        assert found.displaced(context) == pytest.approx(tokens, abs=0.006)


def test_without_a_fit_of_decodes_they_cost_what_they_cost_beside_chunks() -> None:
    found = Speeds.of(StepFit(PrefillFit(0.25, 0.0), MixedFit(0.0, 0.5, 3.0)))
    assert found.displaced(2) == 1 + 0.5 * 2 / 0.25
    assert (found.sequence_s, found.step_s) == (0.0, 3.0)


class Checked(Takeover):
    """Asserts at each decision what its books, and what it takes, have to be."""

    taken = 0

    def agree(self, cluster: ClusterView, decided: Collection[str]) -> None:
        """Assert that books are of who is there, and have each request where it is.

        Args:
            decided: requests of which something has been decided that is still to be done.
        """
        books, bound, fixed = self._books.by_name, self._takes.bound_for, self._takes.fixed
        assert self._books.views == cluster.instances
        assert bound.keys() <= fixed.keys()
        assert all(moves > 0 for moves in map(self._takes.moves.__getitem__, bound))
        for book in books.values():
            assert book.coming.keys() == {name for name, to in bound.items() if to is book}
            assert book.to_compute.keys() <= book.coming.keys()
            assert book.stay == sum(here is book for here in fixed.values())
        at = {
            request.id: (view.name, request)
            for view in cluster.instances.values()
            for request in [*view.waiting, *view.importing.values(), *view.running.values()]
        }
        for name in fixed.keys() - decided:
            if self._changed and name not in at:
                continue  # A lost instance had it: of this, the system hears as it is routed.
            here, request = at[name]
            assert fixed[name] is books[here]
            if name in bound:
                assert [leg.instance for leg in request.legs[1:]] == [bound[name].name]

    def route(self, waiting: Collection[RequestView], cluster: ClusterView) -> Sequence[Assignment]:
        assignments = super().route(waiting, cluster)
        self.agree(cluster, {each.request for each in assignments})
        return assignments

    def on_step(self, step: StepView, cluster: ClusterView) -> Sequence[Action]:
        actions = super().on_step(step, cluster)
        for kind in self._books.kinds:
            assert kind.decodes == sum(book.decodes for book in kind.books)
            assert kind.entries == sum(book.entries for book in kind.books)
            assert kind.with_time == sum(book.busy < 0.9 for book in kind.books)
            assert kind.seats == sum(book.seats for book in kind.books)
            assert kind.room == sum(book.room * book.page_size for book in kind.books)
            assert all(book.step_s <= kind.slowest for book in kind.givers)
            assert all(book.step_s >= kind.fastest for book in kind.books if book.has_room)
        if (book := self._books.by_name.get(step.instance)) and book.longest == 0:
            running = cluster.instances[book.name].running.values()
            decodes = {r.id for r in running if r.computed >= r.prompt_len}
            stay = {name for name, here in self._takes.fixed.items() if here is book}
            # No decode may be taken; but while one that stays waits, or is computed again.
            assert decodes <= self._takes.fixed.keys() or stay - decodes
        taken = [action.request for action in actions if isinstance(action, Reassign)]
        limits = [action for action in actions if isinstance(action, Budget)]
        assert [limit.instance for limit in limits] in ([], [step.instance])
        assert len(taken) == len(set(taken)) == len(actions) - len(limits)
        self.agree(cluster, taken)
        for action in actions:
            if not isinstance(action, Reassign):
                continue
            here = [i for i in cluster.instances.values() if action.request in i.running]
            assert [i.name for i in here] != [action.legs[0].instance]
            if self._waits:  # Prompts are taken while few wait.
                request = here[0].running[action.request]
                assert request.computed >= request.prompt_len
        # Beyond these, they go to faster kinds alone.
        most = self.options.most_moves + len(self._books.kinds) - 1
        assert all(moves <= most for moves in self._takes.moves.values())
        self.taken += len(taken)
        return actions


FITS = st.builds(
    fit,
    st.floats(0.01, 1),
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(0.5, 5),
)
OPTIONS = st.builds(
    TakeoverOptions,
    spared=st.sampled_from((0.0, 0.03, 0.3)),
    most_moves=st.integers(0, 3),
    keeps_room=st.booleans(),
    slo=st.builds(
        Slo,
        ttft=st.none() | st.floats(0.1, 50),
        tbt=st.none() | st.floats(0.1, 10),
    ),
)
LOSSES = st.dictionaries(
    st.sampled_from("AB"),
    st.lists(st.integers(1, 40), min_size=1, max_size=3, unique=True).map(sorted),
    max_size=1,
)


def run(scenario: Scenario, system: Takeover, fits: Sequence[StepFit]) -> Outcome:
    """A run of a scenario whose instances have fits, those that are back too."""

    class Fitted(Instance):
        def __init__(self, name: str, *given: Any, **more: Any) -> None:
            super().__init__(name, *given, **more)
            self.fit = fits["ABC".index(name)]

    made = scenario.run(system, instance_type=Fitted)
    made.greedy = False  # A free instance may leave a request to another one.
    return made.verify()


@examples(40)
@given(scenarios(max_requests=12), st.tuples(FITS, FITS, FITS), OPTIONS)
def test_all_requests_end_with_their_tokens(
    scenario: Scenario, fits: Sequence[StepFit], options: TakeoverOptions
) -> None:
    outcome = run(scenario, Checked(options), fits)
    assert all(r.finish_reason in ("stop", "length") for r in outcome.finished.values())


@examples(40)
@given(scenarios(max_requests=12), st.tuples(FITS, FITS, FITS), OPTIONS, LOSSES)
def test_losses(
    scenario: Scenario,
    fits: Sequence[StepFit],
    options: TakeoverOptions,
    lost: dict[str, list[int]],
) -> None:
    """Nobody fails while one instance is left or to return, whoever is lost and back."""
    there = {name for name, *_ in scenario.instances}
    kept = {name: times for name, times in lost.items() if name in there}
    scenario = replace(scenario, timing=replace(scenario.timing, lost=kept))
    system = Checked(options)
    outcome = run(scenario, system, fits)
    assert not system._takes.moves
    if len(there) > 1 or not kept:
        assert all(r.finish_reason in ("stop", "length") for r in outcome.finished.values())


# By hand: A is slow and small, B fast and large.
AHEAD = {"max_in_flight": 2, "launch_ahead": True}


def pair(
    system: Takeover,
    lengths: Sequence[tuple[int, int]],
    options: Mapping[str, Any] | None = None,
    arrivals: Sequence[float] | None = None,
    **timing: Any,
) -> Outcome:
    """Requests that are there at once, on a pair; steps of the slow one take as long as others."""

    def made_of(name: str) -> Instance:
        pages, seats = {"A": (20, 4), "B": (200, 8)}[name]
        instance = pool(name, pages, max_num_seqs=seats, **options or {})
        instance.fit = SLOW if name == "A" else FAST
        return instance

    both = [made_of("A"), made_of("B")]
    made = Run(system, both, make_requests(lengths, arrivals), unit(**timing), renew=made_of)
    made.greedy = False
    return made.verify()


def moves(outcome: Outcome) -> list[tuple[str, str, str]]:
    return [(t.request.id, t.source, t.dest) for t in outcome.world.transfers]


def test_prompts_go_where_they_are_computed_first_and_decodes_to_the_faster() -> None:
    system = Checked()
    outcome = pair(system, [(8, 9)] * 8)
    begun = {step.batch.instance for step in outcome.world.steps if step.start == 0}
    assert begun == {"A", "B"}
    assert system.taken == len(moves(outcome)) > 0
    assert {(source, dest) for _, source, dest in moves(outcome)} == {("A", "B")}
    assert system._takes.decodes + system._takes.prompts == system.taken
    assert list(system.report()) == ["decodes_taken", "prompts_taken"]


def test_of_those_alike_whoever_has_the_longest_decode_gives_it() -> None:
    """A and C are alike, and begin with a prompt of 6 and of 12 tokens; B has one seat."""
    a, c = (pool(name, 20, max_num_seqs=1) for name in "AC")
    b = pool("B", 200, max_num_seqs=1)
    a.fit, b.fit, c.fit = SLOW, FAST, SLOW
    work = make_requests([(4, 4), (6, 9), (12, 9), (4, 2), (4, 2)])
    made = Run(Checked(), [a, b, c], work, unit())
    made.greedy = False
    assert moves(made.verify())[0] == ("r2", "C", "B")


def test_without_moves_nothing_is_taken() -> None:
    assert moves(pair(Checked(TakeoverOptions(most_moves=0)), [(8, 9)] * 8)) == []


def test_a_request_that_ends_with_the_step_of_the_take_is_not_sent() -> None:
    assert moves(pair(Checked(), [(8, 1)] * 8)) == []


def test_the_taker_is_lost_while_kv_is_on_its_way() -> None:
    """The request goes on where its KV still lies."""
    system = Checked()
    whole = pair(system, [(8, 9)] * 8, transfers={"B": 6})
    first = min(t.requested for t in whole.world.transfers)
    system = Checked()
    outcome = pair(system, [(8, 9)] * 8, transfers={"B": 6}, lost={"B": first + 3})
    assert all(r.finish_reason == "length" for r in outcome.finished.values())
    assert system.taken > 0


@pytest.mark.parametrize("back", [(), (0.5,)])
def test_the_taker_is_lost_before_the_move(back: tuple[float, ...]) -> None:
    """A step of those that are taken is still under way; they may be taken again."""
    lengths, once = [(8, 9)] * 8, TakeoverOptions(most_moves=1)
    first = min(t.requested for t in pair(Checked(once), lengths, AHEAD).world.transfers)
    times = [first - 0.75, *(first - each for each in back)]
    system = Checked(once)
    outcome = pair(system, lengths, AHEAD, lost={"B": times})
    assert all(r.finish_reason == "length" for r in outcome.finished.values())
    assert system.taken == len(moves(outcome)) + 1


def test_a_prompt_that_cannot_end_in_a_small_pool_is_computed_there_all_the_same() -> None:
    """Twenty entries: a prompt of 16, whose answer needs 30."""
    outcome = pair(Checked(), [(16, 15)] * 4)
    begun = {s.batch.instance for s in outcome.world.steps if s.start == 0}
    assert begun == {"A", "B"}
    assert all(r.finish_reason == "length" for r in outcome.finished.values())


def test_one_that_fits_nowhere_is_refused_and_takes_no_room() -> None:
    outcome = pair(Checked(), [(16, 300), *[(8, 9)] * 8])
    assert outcome.finished.pop("r0").finish_reason == "error"
    assert all(r.finish_reason == "length" for r in outcome.finished.values())
    assert "B" in {step.batch.instance for step in outcome.world.steps if step.start == 0}


def test_a_take_that_does_not_come_about_leaves_an_idle_instance_its_room() -> None:
    """The one taken ends with the step under way; the next needs all of the large pool."""
    lengths, system = [(8, 1), (8, 2), (195, 5)], Checked()
    outcome = pair(system, lengths, AHEAD, arrivals=[0, 0, 9])
    assert system.taken == 1
    assert not moves(outcome)
    assert all(r.finish_reason == "length" for r in outcome.finished.values())


def test_a_prompt_too_long_for_a_small_pool_does_not_leave_the_large_one_idle() -> None:
    """The A10 has time, but cannot hold every fourth prompt; room there would not help it."""
    work = [BenchRequest(None, 500 if n % 4 else 25_000, 200, 0.0) for n in range(40)]
    kept, let_go = (
        simulate(
            cases.TakeoverRun(cases.Cell("A100+A10", 256, 32), "takeover/pair", more, 0).config(),
            work,
        ).wall_s
        for more in ((), ("system.keeps_room=false",))
    )
    assert kept < 1.1 * let_go


def test_a_large_pool_that_is_mostly_free_begins_prompts_too() -> None:
    """At a rate that the pair serves with ease, the A10 has time, but not for all prompts."""
    cell = cases.Cell("A100+A10", 4096, 128)
    work = [replace(r, arrival=i / 2.5) for i, r in enumerate(cell.work(1, 40))]
    kept, let_go = (
        simulate(cases.TakeoverRun(cell, "takeover/pair", more, 0).config(), work).ttft_p99
        for more in ((), ("system.keeps_room=false",))
    )
    assert kept is not None
    assert let_go is not None
    assert kept < 1.1 * let_go


@pytest.mark.parametrize(("sequence_s", "gives"), [(0.005, True), (0.4, False)])
def test_a_large_pool_that_is_nearly_full_is_for_decodes_that_displace_less_there(
    sequence_s: float, gives: bool
) -> None:
    """A small pool's decodes displace one token there, and 1.05 or 5 on the large one."""
    small = InstanceClass(Speeds.of(fit(0.4, step_s=4.0)), 100, decodes=8, due=80, all_seats=8)
    large = InstanceClass(Speeds.of(fit(0.1, sequence_s)), 1000, seats=1, room=500, below=[small])
    large.all_seats, large.all_room = 8, 1000
    system = Takeover()
    assert system._gives(small, large, 10.0) == gives
    assert system._is_kept(large) == gives


@pytest.mark.parametrize(("sequence_s", "kept"), [(0.095, True), (0.105, False)])
def test_a_large_pool_is_not_kept_for_decodes_that_displace_far_more_there(
    sequence_s: float, kept: bool
) -> None:
    """A small pool with time for prompts; its decodes displace 1.95 or 2.05 times as much there."""
    small = InstanceClass(Speeds.of(fit(0.4, step_s=4.0)), 100, decodes=8, due=80, with_time=1)
    large = InstanceClass(Speeds.of(fit(0.1, sequence_s)), 1000, seats=1, room=500, below=[small])
    large.all_seats, large.all_room = 8, 1000
    system = Takeover()
    system._next = 100
    assert system._is_kept(large) == kept
    system._next = 101  # Nor for prompts that the small pool cannot hold.
    assert not system._is_kept(large)


def test_room_is_made_for_all_prompts_of_two_steps() -> None:
    """Two steps have eight tokens: with two, four or six of others, prompts of the rest begin."""
    made: set[tuple[int, float]] = set()

    class Noted(Takes):
        def take(
            self, to: Account, book: Account, actions: list[Action], wanted: float = inf
        ) -> None:
            if wanted < inf:
                made.add((book.backlog, wanted + book.room))
            super().take(to, book, actions, wanted)

    system = Checked()
    system._takes = Noted(system._books, 2)
    pair(system, [(2, 9)] * 24)
    assert made == {(2, 6), (4, 4), (6, 2)}


def test_room_is_made_where_seats_are_lacking_too() -> None:
    """The small pool has four seats and a page of 64 entries for each request, others to spare."""
    made: set[tuple[int, int, float]] = set()

    class Noted(Takes):
        def take(
            self, to: Account, book: Account, actions: list[Action], wanted: float = inf
        ) -> None:
            if wanted < inf:
                assert (book.name, to.name) == ("A", "B")
                made.add((book.backlog, book.seats, wanted))
            super().take(to, book, actions, wanted)

    system = Checked()
    system._takes = Noted(system._books, 2)
    both = [pool("A", 20, 64, max_num_seqs=4), pool("B", 200, 64, max_num_seqs=8)]
    both[0].fit, both[1].fit = fit(0.4, step_s=4.0), fit(0.1, 0.05)
    run = Run(system, both, make_requests([(2, 9)] * 24, None), unit())
    run.greedy = False
    run.verify()
    assert made
    for backlog, seats, wanted in made:
        assert wanted == (8 - backlog) / 2 - seats > 0


def test_shares_of_all_systems_are_of_one_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A10s that compute prompts alone bound what a cluster can do at 9.02 / 10.54 of it."""
    monkeypatch.setattr(cases.Cell, "count", 40)
    cell = cases.Cell("A100+A10", 256, 512)
    runs = {
        system: cases.TakeoverRun(cell, *next(iter(cases.SYSTEMS[system].values())), 0)
        for system in (cases.OURS, "L-H")
    }
    work = cell.work(0, 40)
    ours, theirs = (bound_of(prepare(each.config()), work).rate for each in runs.values())
    assert theirs < 0.9 * ours
    made = cases.shares(runs["L-H"])
    assert made is not None
    assert made[1] == 40 / simulate(runs["L-H"].config(), work).wall_s / ours
