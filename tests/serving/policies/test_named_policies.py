"""Policies by name: what each may never do, and each by hand; tokens are the same under all."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from policy_cases import Instant, serve
from properties import examples
from scenarios import Scenario, policy_options, scenarios

from jaxinfer.serving.admission import peak_entries
from jaxinfer.serving.batch import Row
from jaxinfer.serving.batch_builder import BatchBuilder
from jaxinfer.serving.policies import PolicyOptions


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


def test_a_limit_holds_back_prompts_not_imports() -> None:
    run = Instant()
    run.add((9, 2), (3, 2))
    batch = BatchBuilder(run.instance)
    assert batch.admit(8) is None
    first = batch.admit(9)
    assert first
    assert first.id == "r0"
