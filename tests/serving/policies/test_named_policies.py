"""Policies by name: what each may never do, and each by hand; tokens are the same under all."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples
from scenarios import Follow, Scenario, policy_options, scenarios
from serving_checks import Outcome, make_kv, make_requests, new_instance

from jaxinfer.config.engine import EngineOptions
from jaxinfer.errors import JaxinferError
from jaxinfer.serving.admission import peak_entries
from jaxinfer.serving.batch import Row
from jaxinfer.serving.batch_builder import BatchBuilder
from jaxinfer.serving.instance import Instance, InstanceOptions
from jaxinfer.serving.policies import Policies, PolicyOptions, make_policies
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.system import Leg


def serve(
    scenario: Scenario, chosen: PolicyOptions, predicted: Sequence[tuple[int, int] | None] = ()
) -> Outcome:
    run = scenario.run(Follow(scenario.by_id), lambda: make_policies(chosen))
    for request, both in zip(run.requests, predicted, strict=False):
        request.predicted = both
    outcome = run.verify()
    assert not any(request.error for request in outcome.finished.values())
    budgets = {i.name: i.options.max_num_batched_tokens for i in run.instances}
    for batch in outcome.world.batches:
        assert sum(row.count for row in batch.rows) <= budgets[batch.instance]
    return outcome


def ranges() -> st.SearchStrategy[tuple[int, int] | None]:
    return st.none() | st.tuples(st.integers(0, 8), st.integers(0, 8)).map(
        lambda both: (both[0], sum(both))
    )


@examples(200)
@given(scenarios(), policy_options(), st.lists(ranges(), max_size=7))
def test_any_policies_serve_all_and_keep_budgets(
    scenario: Scenario, chosen: PolicyOptions, predicted: list[tuple[int, int] | None]
) -> None:
    serve(scenario, chosen, predicted)


def is_decode(row: Row) -> bool:
    return row.count == 1 and row.start >= row.request.prompt_len


@examples(100)
@given(scenarios(), st.none() | st.integers(1, 12))
def test_prefill_first_never_mixes(scenario: Scenario, prefill_tokens: int | None) -> None:
    chosen = PolicyOptions(batching={"name": "prefill_first", "prefill_tokens": prefill_tokens})
    for batch in serve(scenario, chosen).world.batches:
        prompts = [row for row in batch.rows if row.start < row.request.prompt_len]
        decodes = [row for row in batch.rows if is_decode(row)]
        assert not (prompts and decodes)
        # Several in one step only within the limit.
        if prefill_tokens and len(prompts) > 1:
            assert sum(row.count for row in prompts) <= prefill_tokens


@examples(100)
@given(scenarios(), st.integers(1, 12), st.integers(1, 3))
def test_whole_prompts_keep_to_their_tokens(scenario: Scenario, tokens: int, skips: int) -> None:
    options = {"name": "whole_prompts", "step_tokens": tokens, "max_skips": skips}
    for batch in serve(scenario, PolicyOptions(batching=options)).world.batches:
        assert len(batch.rows) == 1 or sum(row.count for row in batch.rows) <= tokens


@examples(100)
@given(scenarios())
def test_even_decodes_keep_to_their_share(scenario: Scenario) -> None:
    outcome = serve(scenario, PolicyOptions(batching="even_decodes"))
    if any(request.metrics.num_preemptions for request in outcome.finished.values()):
        return  # Those that are counted after a step was formed are fewer then.
    options = {name: each for name, *_, each in scenario.instances}
    for batch in outcome.world.batches:
        each = options[batch.instance]
        steps = 1 if each.launch_ahead else each.max_in_flight
        decodes = sum(is_decode(row) for row in batch.rows)
        assert decodes <= -(-batch.num_running // steps)


@examples(100)
@given(scenarios(max_instances=1, max_legs=1))
def test_one_batch_admits_into_an_empty_one(scenario: Scenario) -> None:
    """Nobody else begins between two members of one batch that have begun together."""
    outcome = serve(scenario, PolicyOptions(batching="one_batch"))
    if any(request.metrics.num_preemptions for request in outcome.finished.values()):
        return
    launched = {}
    for number, batch in enumerate(outcome.world.batches):
        for row in batch.rows:
            launched.setdefault(row.request.id, [number, number])[1] = number
    batches: list[list[int]] = []
    for first, last in sorted(launched.values()):
        if batches and first <= batches[-1][1]:
            batches[-1][1] = max(batches[-1][1], last)
        else:
            batches.append([first, last])
    # In a batch of several steps, all are known to the queue before its first one.
    for begin, end in batches:
        members = [
            outcome.finished[n] for n, (first, _) in launched.items() if begin <= first <= end
        ]
        start = outcome.world.steps[begin].start
        assert all(request.arrival <= start for request in members)


@examples(150)
@given(scenarios(max_instances=1, max_legs=1))
def test_exact_upper_bounds_never_preempt(scenario: Scenario) -> None:
    # One that stops by itself may have been launched ahead of its stop.
    scripts = [replace(script, stop_at=None) for script in scenario.scripts]
    exact = [(script.max_tokens, script.max_tokens) for script in scripts]
    chosen = PolicyOptions(admit="reserve_static")
    outcome = serve(replace(scenario, scripts=scripts), chosen, exact)
    assert all(r.metrics.num_preemptions == 0 for r in outcome.finished.values())


@examples(150)
@given(scenarios(max_legs=1))
def test_whole_requests_are_never_preempted(scenario: Scenario) -> None:
    outcome = serve(scenario, PolicyOptions(admit="whole_request"))
    assert all(r.metrics.num_preemptions == 0 for r in outcome.finished.values())


@examples(250)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=8))
def test_peak_is_the_largest_sum_over_iterations(requests: list[tuple[int, int]]) -> None:
    """A request with ``left`` to come has ``now + t`` entries in step t, if ``t <= left``."""
    steps = (
        sum(now + t for now, left in requests if t <= left)
        for t in range(max((left for _, left in requests), default=0) + 1)
    )
    assert peak_entries(requests) == max(steps)


# By hand: one instance, steps committed at once.


class Instant:
    """Requests on one instance, whose steps end as soon as they are formed."""

    def __init__(
        self, pages: int = 100, size: int = 1, grouped: bool = False, **options: Any
    ) -> None:
        limits: dict[str, Any] = {
            "max_num_batched_tokens": 100,
            "max_num_seqs": 8,
            "watermark": 0.0,
            "max_in_flight": 2,
            "launch_ahead": True,
        }
        given = {name: options.pop(name) for name in list(options) if name in limits}
        policies = make_policies(PolicyOptions(**options))
        opts = InstanceOptions(**(limits | given))
        kv = make_kv(pages, size)
        self.instance = new_instance("A", kv, opts, policies, groups_decodes=grouped)
        self._numbers = count()

    def add(self, *lengths: tuple[int, int], predicted: tuple[int, int] | None = None) -> None:
        for request in make_requests(lengths):
            request.id = f"r{next(self._numbers)}"
            request.legs = [Leg("A")]
            request.predicted = predicted
            self.instance.waiting.append(request)

    def step(self) -> dict[str, int]:
        """Tokens computed of each request."""
        batch = self.instance.next_batch()
        if not batch:
            return {}
        self.instance.in_flight -= 1
        for row in batch.rows:
            request = row.request
            row.hold.unpin()
            request.computed = row.start + row.count
            if row.samples:
                request.pending -= 1
                request.output_token_ids.append(0)
            if len(request.output_token_ids) == request.max_tokens:
                self.instance.remove(request)
                assert request.hold
                request.hold.release()
        return {row.request.id: row.count for row in batch.rows}


def test_prefill_first_by_hand() -> None:
    run = Instant(batching={"name": "prefill_first", "prefill_tokens": 10})
    run.add((4, 3), (6, 3), (3, 2))
    assert run.step() == {"r0": 4, "r1": 6}
    assert run.step() == {"r2": 3}
    assert run.step() == {"r0": 1, "r1": 1, "r2": 1}
    run.add((25, 1))
    assert run.step() == {"r3": 25}  # Longer than the limit: alone.
    assert run.step() == {"r0": 1, "r1": 1}


def test_a_prompt_above_the_budget_is_cut_by_it_and_decodes_wait() -> None:
    run = Instant(batching="prefill_first", max_num_batched_tokens=10)
    run.add((2, 4))
    assert run.step() == {"r0": 2}
    run.add((25, 1), (3, 1))
    assert [run.step() for _ in range(5)] == [
        {"r1": 10},
        {"r1": 10},
        {"r1": 5, "r2": 3},
        {"r0": 1},
        {"r0": 1},
    ]


def test_whole_prompts_by_hand() -> None:
    run = Instant(batching={"name": "whole_prompts", "step_tokens": 10, "max_skips": 2})
    run.add((4, 9), (5, 9), (6, 9))
    assert run.step() == {"r0": 4, "r1": 5}  # The third would be the sixteenth token.
    assert run.step() == {"r2": 6, "r0": 1, "r1": 1}
    run.add((9, 9), (20, 9))
    assert run.step() == {"r3": 9, "r0": 1}
    assert run.step() == {"r4": 20}  # Longer than the limit: alone.
    # Two were left out twice: they go before all others.
    run.add((9, 9))
    assert run.step() == {"r1": 1, "r2": 1, "r0": 1, "r3": 1, "r4": 1}
    assert run.step() == {"r5": 9, "r0": 1}


@pytest.mark.parametrize(
    ("batching", "wanted"), [("mixed", [5, 0, 0]), ("even_decodes", [2, 2, 1])]
)
def test_decodes_of_a_pipeline_by_hand(batching: str, wanted: list[int]) -> None:
    """Three steps in flight, five decodes that are all ready when the first one is formed."""
    run = Instant(batching=batching, max_in_flight=3, launch_ahead=False, max_num_batched_tokens=50)
    run.add(*[(4, 9)] * 5)
    assert run.step() == dict.fromkeys(("r0", "r1", "r2", "r3", "r4"), 4)
    batches = [run.instance.next_batch() for _ in range(3)]
    assert [len(batch.rows) if batch else 0 for batch in batches] == wanted
    rows = [row.request.id for batch in batches if batch for row in batch.rows]
    assert rows == ["r0", "r1", "r2", "r3", "r4"]  # By admission, each once.


def test_one_batch_by_hand() -> None:
    run = Instant(batching="one_batch")
    run.add((3, 1), (4, 3))
    assert run.step() == {"r0": 3, "r1": 4}
    run.add((2, 1))
    assert [run.step() for _ in range(4)] == [{"r1": 1}, {"r1": 1}, {"r2": 2}, {}]


@pytest.mark.parametrize(
    ("order", "wanted"),
    [
        ("fcfs", ["r0", "r1", "r2", "r3"]),
        ("shortest_prompt_first", ["r1", "r3", "r0", "r2"]),
        ("longest_prompt_first", ["r2", "r0", "r1", "r3"]),
    ],
)
def test_orders(order: str, wanted: list[str]) -> None:
    run = Instant(order=order)
    run.add((4, 2), (3, 2), (5, 2), (3, 2))
    assert list(run.step()) == wanted


ROOM: list[tuple[str | dict[str, Any], tuple[int, int] | None, int]] = [
    # 20 entries; each request has 4 of its prompt, and 9 at its end; two are predicted 3 to 5.
    ("greedy", None, 5),
    ("whole_request", (3, 5), 2),
    ({"name": "reserve_longest", "tokens": 7}, None, 2),
    ({"name": "reserve_longest", "tokens": 50}, None, 1),
    ("reserve_static", None, 2),
    ("reserve_static", (3, 5), 2),
    ({"name": "reserve_static", "bound": "low"}, (3, 5), 3),
    # All end at once: when the shortest has ended, all have.
    ("reserve_dynamic", None, 2),
    ({"name": "reserve_dynamic", "bound": "low"}, (3, 5), 3),
    ("peak", (3, 5), 2),
    ({"name": "peak", "bound": "low"}, (3, 5), 3),
]


@pytest.mark.parametrize(("admit", "predicted", "wanted"), ROOM)
def test_admissions_at_once(admit: Any, predicted: tuple[int, int] | None, wanted: int) -> None:
    """Ends: 4 + 6 - 1 = 9 by the limit, 8 by the upper and 6 by the lower end of 3 to 5."""
    run = Instant(pages=20, admit=admit)
    run.add(*[(4, 6)] * 6, predicted=predicted)
    assert len(run.step()) == wanted


def test_dynamic_waits_for_the_next_end_only_and_peak_for_all() -> None:
    """20 entries. One request of 3 that grows to 12, one of 3 to 4: a third one of 6 to 14 has room
    until the second has ended (4 + 4 + 7 = 15), not to its end (12 + 14 = 26).
    """
    for admit, wanted in (("reserve_dynamic", 3), ("peak", 2), ("reserve_static", 2)):
        run = Instant(pages=20, admit=admit)
        run.add((3, 10), (3, 2), (6, 9))
        assert len(run.step()) == wanted, admit


def test_peak_has_requests_follow_each_other() -> None:
    """16 entries. 8 that grow to 9, beside 2 that grow to 12: the sum of the ends is 21, but when
    the first has 9, the second has 3; alone it has 12.
    """
    for admit, wanted in (("reserve_static", 1), ("peak", 2)):
        run = Instant(pages=16, admit=admit)
        run.add((8, 2), (2, 11))
        assert len(run.step()) == wanted, admit


def test_pages_count_whole() -> None:
    """Ends of 5 entries in pages of 4 take two each: four fit into eight pages, not five."""
    run = Instant(pages=8, size=4, admit="reserve_static")
    run.add(*[(4, 2)] * 6)
    assert len(run.step()) == 4


# Names and options.


def own(waiting: Sequence[RequestState]) -> RequestState:
    return waiting[-1]


def fails(waiting: Sequence[RequestState]) -> RequestState:
    raise KeyError("nothing")


def astray(waiting: Sequence[RequestState]) -> str:
    return "r0"


def answers_three(*asked: object) -> int:
    return 3


def takes(count: int, times: int = 1) -> Callable[[BatchBuilder], None]:
    """A policy that computes so many tokens of the first request, in so many rows."""

    def form(batch: BatchBuilder) -> None:
        if request := batch.admit():
            for _ in range(times):
                batch.add(request, count)

    return form


takes_none, takes_back, takes_two_rows = takes(0), takes(-1), takes(1, 2)
takes_more_than_it_has, takes_more_than_fit, takes_more_than_a_step = takes(6), takes(99), takes(5)


def takes_five_beside_a_group(batch: BatchBuilder) -> None:
    batch.add_group()
    if request := batch.admit():
        batch.add(request, 5)


def pops(waiting: Any) -> RequestState:
    return waiting.popleft()


def deletes(waiting: Any) -> RequestState:
    del waiting[0]
    return waiting[0]


def looks(waiting: Sequence[RequestState]) -> RequestState:
    assert [*waiting] == [waiting[i] for i in range(len(waiting))] == waiting[:]
    assert waiting[-1] in waiting
    return max(waiting, key=lambda request: request.id)


class CannotBeMade:
    def __init__(self) -> None:
        raise ValueError("not today")


class CannotBeCalled:
    pass


class OddOptions:
    Options = 3


def leaves(*asked: Any) -> None:
    raise SystemExit(3)


class LeavesAtOnce:
    def __init__(self) -> None:
        raise SystemExit(3)


def refuses(waiting: Sequence[RequestState]) -> RequestState:
    raise JaxinferError("nobody is next")


class TwoAtATime:
    """Admits so many."""

    Options = EngineOptions  # Any options will do.

    def __init__(self, options: EngineOptions) -> None:
        self.most = options.max_num_seqs

    def __call__(self, instance: Instance, request: RequestState, leg: Leg) -> bool:
        return len(instance.running) < self.most


class Plain:
    def __call__(self, instance: Instance, request: RequestState, leg: Leg) -> bool:
        return True


ME = __name__


def test_ones_own_function_and_class() -> None:
    run = Instant(
        order=f"{ME}:own",
        admit={"name": f"{ME}:TwoAtATime", "max_num_seqs": 2},
    )
    run.add((1, 2), (2, 2), (3, 2))
    assert run.step() == {"r2": 3, "r1": 2}


@pytest.mark.parametrize(
    ("kind", "name", "reason"),
    [
        ("order", "fails", "raises KeyError: 'nothing'"),
        *((kind, "leaves", "raises SystemExit: 3 (") for kind in ("order", "admit", "batching")),
        ("order", "astray", "returns 'r0', must be one of the requests"),
        ("order", "pops", "raises AttributeError: '_ReadOnly' object has no attribute 'popleft'"),
        ("order", "deletes", "raises TypeError: '_ReadOnly' object doesn't support item deletion"),
        ("admit", "answers_three", "returns 3, must be True or False"),
        ("batching", "answers_three", "returns 3, must return nothing"),
        ("batching", "takes_none", "takes in 0 tokens of 'r0', must be 1 to 5"),
        ("batching", "takes_back", "takes in -1 tokens of 'r0', must be 1 to 5"),
        ("batching", "takes_more_than_it_has", "takes in 6 tokens of 'r0', must be 1 to 5"),
        (
            "batching",
            "takes_more_than_fit",
            "raises ValueError: add: request 'r0' up to 99 KV entries, may have 5 in this step",
        ),
        (
            "batching",
            "takes_more_than_a_step",
            "forms a step of 5 tokens, max_num_batched_tokens is 4",
        ),
        ("batching", "takes_two_rows", "takes in a request twice in one step"),
    ],
)
def test_what_ones_own_does_amiss_names_it(kind: str, name: str, reason: str) -> None:
    budget = 4 if name == "takes_more_than_a_step" else 9
    run = Instant(10, 4, max_num_batched_tokens=budget, **{kind: f"{ME}:{name}"})
    run.add((5, 2))
    with pytest.raises(JaxinferError) as error:
        run.step()
    assert str(error.value).startswith(f"policies.{kind}: {ME}:{name} {reason}")


def test_decodes_that_go_together_count_in_ones_own_step() -> None:
    policy = f"{ME}:takes_five_beside_a_group"
    run = Instant(grouped=True, max_num_batched_tokens=5, batching=policy)
    run.add((5, 3))
    assert run.step() == {"r0": 5}
    run.add((5, 2))
    with pytest.raises(
        JaxinferError, match="forms a step of 6 tokens, max_num_batched_tokens is 5"
    ):
        run.step()


def test_ones_own_may_look_at_the_queue() -> None:
    run = Instant(order=f"{ME}:looks")
    run.add((1, 2), (2, 2), (3, 2))
    assert list(run.step()) == ["r2", "r1", "r0"]


def test_what_ones_own_says_itself_is_left_as_it_is() -> None:
    run = Instant(order=f"{ME}:refuses")
    run.add((1, 2))
    with pytest.raises(JaxinferError, match=r"^nobody is next$"):
        run.step()


def test_ones_own_victim_is_one_of_those_that_may_be() -> None:
    run = Instant(pages=4, victim=f"{ME}:astray")
    run.add((2, 3), (2, 3))
    assert run.step() == {"r0": 2, "r1": 2}
    with pytest.raises(JaxinferError, match=rf"^policies\.victim: {ME}:astray returns 'r0', must"):
        run.step()


@pytest.mark.parametrize(
    ("policies", "reason"),
    [
        ({"order": "sjf"}, "policies.order: no policy 'sjf': known: fcfs"),
        ({"admit": "greddy"}, "policies.admit: no policy 'greddy': did you mean 'greedy'?; or"),
        ({"order": {"name": "fcfs", "x": 1}}, "policies.order.x: fcfs has no options"),
        ({"order": {"x": 1}}, "policies.order.name is missing, must be one of fcfs"),
        ({"order": {"name": f"{ME}:own", "x": 1}}, f"policies.order.x: {ME}:own has no options"),
        ({"admit": {"name": f"{ME}:Plain", "x": 1}}, "policies.admit.x: Plain has no options"),
        (
            {"batching": {"name": "prefill_first", "prefill_tokens": 0}},
            "policies.batching.prefill_tokens is 0, must be greater than or equal to 1",
        ),
        (
            {"admit": {"name": "peak", "bund": "low"}},
            "policies.admit.bund: unknown option, did you mean 'bound'?",
        ),
        ({"admit": "reserve_longest"}, "policies.admit.tokens is missing"),
        ({"victim": "nowhere:f"}, "policies.victim: 'nowhere:f': No module named 'nowhere'"),
        ({"victim": f"{ME}:ME"}, f"policies.victim: '{ME}:ME' is '{ME}', must be a fun"),
        ({"victim": f"{ME}:gone"}, f"policies.victim: '{ME}:gone': module '{ME}' has no attr"),
        (
            {"sort": "fcfs"},
            "policies.sort: unknown option, known: admit, batching, order, victim",
        ),
        (
            {"batching": "mixed", "form_batch": "mixed"},
            "policies.form_batch: batching is its name now, and is given, too; remove one",
        ),
        ({"order": 3}, "policies.order"),
        ({"order": {"name": 3}}, "policies.order.name is 3, must be one of fcfs"),
        ({"order": ".near:f"}, "policies.order: '.near:f': must look like my_module:thing"),
        ({"admit": f"{ME}:CannotBeMade"}, "policies.admit: making a CannotBeMade raises ValueErr"),
        ({"admit": f"{ME}:LeavesAtOnce"}, "policies.admit: making a LeavesAtOnce raises SystemExi"),
        ({"admit": f"{ME}:CannotBeCalled"}, "policies.admit: a CannotBeCalled cannot be called"),
        ({"admit": f"{ME}:OddOptions"}, "policies.admit: OddOptions.Options is 3, must be a sub"),
    ],
)
def test_refused(policies: dict[str, Any], reason: str) -> None:
    with pytest.raises(JaxinferError) as error:
        EngineOptions(policies=policies)
    assert str(error.value).startswith(reason)
    assert "\n" not in str(error.value)


def test_the_old_key_of_batching_is_taken_with_a_note() -> None:
    with pytest.warns(FutureWarning, match="policies.form_batch is now policies.batching"):
        options = EngineOptions(policies={"order": "fcfs", "form_batch": "one_batch"})
    assert options.policies == PolicyOptions(batching="one_batch")


def test_each_instance_has_policies_of_its_own() -> None:
    options = PolicyOptions(batching="whole_prompts")
    assert make_policies(options).batching is not make_policies(options).batching
    assert make_policies(PolicyOptions()) == Policies()


def test_a_limit_holds_back_prompts_not_imports() -> None:
    run = Instant()
    run.add((9, 2), (3, 2))
    batch = BatchBuilder(run.instance)
    assert batch.admit(8) is None
    first = batch.admit(9)
    assert first
    assert first.id == "r0"
