"""Policies that form batches, by hand: whose turn it is where prompts and decodes compete."""

from typing import Any

import pytest
from serving_checks import make_kv, new_instance

from jaxinfer import JaxinferError
from jaxinfer.serving.instance import Instance
from jaxinfer.serving.instance_options import InstanceOptions
from jaxinfer.serving.policies import PolicyOptions, make_policies
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.views import Leg

PREFILL_FIRST = {"name": "prefill_first", "prefill_tokens": 10}
WHOLE_PROMPTS = {"name": "whole_prompts", "step_tokens": 10, "max_skips": 2}


def make(batching: Any, pages: int = 100, order: str = "fcfs", **options: Any) -> Instance:
    """Pages of one token."""
    policies = make_policies(PolicyOptions(batching=batching, order=order))
    limits = {"max_num_batched_tokens": 100, "watermark": 0.0} | options
    return new_instance("A", make_kv(pages, 1), InstanceOptions(**limits), policies)


def queue(instance: Instance, name: str, prompt_len: int, max_tokens: int = 9) -> RequestState:
    request = RequestState(name, prompt_len, max_tokens)
    request.legs = [Leg("A")]
    instance.waiting.append(request)
    return request


def running(instance: Instance, name: str, prompt_len: int, computed: int) -> RequestState:
    """Return a running request as it comes from elsewhere: a decode has one token."""
    request = RequestState(name, prompt_len, 9)
    request.legs = [Leg("A")]
    request.output_token_ids = [0] * (computed >= prompt_len)
    request.computed = request.launched = computed
    request.hold = instance.kv.reserve(computed)
    instance.taking_part.add(request)
    return request


def launch(instance: Instance) -> dict[str, int]:
    """Tokens of each request in the next step, which stays in flight."""
    batch = instance.next_batch()
    return {row.request.id: row.count for row in batch.rows} if batch else {}


def step(instance: Instance) -> dict[str, int]:
    """The same of a step that ends at once."""
    batch = instance.next_batch()
    if not batch:
        return {}
    instance.in_flight -= 1
    for row in batch.rows:
        row.hold.unpin()
        row.request.computed = row.start + row.count
        if row.samples:
            row.request.pending -= 1
            row.request.output_token_ids.append(0)
    return {row.request.id: row.count for row in batch.rows}


@pytest.mark.parametrize(("limit", "budget"), [(10, 20), (20, 10), (None, 10)])
def test_a_second_prompt_is_whole_or_waits(limit: int | None, budget: int) -> None:
    """Ten tokens of prompts, by the limit or by the step's budget."""
    policy = {"name": "prefill_first", "prefill_tokens": limit}
    a = make(policy, max_num_batched_tokens=budget)
    for name, prompt_len in (("p", 6), ("q", 8), ("r", 2)):
        queue(a, name, prompt_len)
    assert [step(a), step(a), step(a)] == [{"p": 6}, {"q": 8, "r": 2}, {"p": 1, "q": 1, "r": 1}]


def test_the_rest_of_a_cut_prompt_counts_towards_the_limit() -> None:
    a = make("prefill_first", max_num_batched_tokens=10)
    queue(a, "p", 25)
    queue(a, "q", 6)
    assert [step(a) for _ in range(4)] == [{"p": 10}, {"p": 10}, {"p": 5}, {"q": 6}]


@pytest.mark.parametrize(("tokens", "rows"), [(10, {"p": 5, "q": 5}), (9, {"p": 5})])
def test_prompts_that_run_are_taken_whole_up_to_the_limit(
    tokens: int, rows: dict[str, int]
) -> None:
    a = make({"name": "prefill_first", "prefill_tokens": tokens})
    for name in "pq":
        running(a, name, 9, 4)
    assert step(a) == rows


def test_prompts_wait_while_a_decode_waits_for_pages() -> None:
    """Two entries of five are d's; three are another step's, until it has ended."""
    a = make("prefill_first", pages=5)
    running(a, "d", 2, 2)
    other = a.kv.reserve(3)
    assert other
    other.pin()
    other.release()
    assert step(a) == {}
    other.unpin()
    queue(a, "p", 3)
    # Now there is room for either.
    assert [step(a), step(a)] == [{"d": 1}, {"d": 1}]


def test_a_decode_that_the_budget_leaves_out_lacks_no_pages() -> None:
    a = make("prefill_first", max_num_batched_tokens=2)
    for name in "def":
        running(a, name, 4, 4)
    assert step(a) == {"d": 1, "e": 1}
    queue(a, "p", 2)
    assert step(a) == {"p": 2}


def test_a_decode_that_was_preempted_does_not_hold_prompts_back() -> None:
    a = make("prefill_first", pages=4, order="shortest_prompt_first")
    for name in "de":
        running(a, name, 2, 2)
    assert step(a) == {"d": 1}  # On e's pages.
    assert [request.id for request in a.waiting] == ["e"]
    queue(a, "p", 1)
    assert step(a) == {"p": 1}


def test_kv_that_comes_in_is_decoded_after_the_prompts() -> None:
    a = make(PREFILL_FIRST)
    moved = queue(a, "d", 4)
    hold = a.kv.reserve(4)
    assert hold
    moved.exported, moved.output_token_ids = ("A", hold), [0]
    moved.computed = moved.launched = 4
    a.num_exported = 1
    queue(a, "p", 3)
    assert [step(a), step(a)] == [{"p": 3}, {"d": 1, "p": 1}]


@pytest.mark.parametrize("policy", [PREFILL_FIRST, WHOLE_PROMPTS])
@pytest.mark.parametrize("ahead", [True, False])
def test_decodes_are_launched_ahead_of_their_input_where_they_may_be(
    policy: dict[str, Any], ahead: bool
) -> None:
    a = make(policy, launch_ahead=ahead, max_in_flight=2)
    queue(a, "p", 3)
    assert [launch(a), launch(a)] == [{"p": 3}, {"p": 1} if ahead else {}]


def test_prompts_may_fill_a_step_to_its_last_token() -> None:
    a = make(WHOLE_PROMPTS)
    queue(a, "p", 4)
    queue(a, "q", 6)
    assert step(a) == {"p": 4, "q": 6}


def test_a_pause_is_not_to_be_left_out() -> None:
    """Two steps would have d go before all others."""
    a = make(WHOLE_PROMPTS)
    paused = running(a, "d", 4, 4)
    running(a, "e", 4, 4)
    paused.paused = True
    assert [step(a), step(a)] == [{"e": 1}, {"e": 1}]
    paused.paused = False
    queue(a, "p", 10)
    assert step(a) == {"p": 10}


def test_decodes_that_are_overdue_stay_within_the_step() -> None:
    """Two of five decodes fit, also of those left out twice, which precede others and prompts."""
    a = make({"name": "whole_prompts", "step_tokens": 2, "max_skips": 2})
    for name in "defgh":
        running(a, name, 4, 4)
    assert [step(a), step(a)] == [{"d": 1, "e": 1}] * 2
    queue(a, "p", 1)
    assert [step(a), step(a)] == [{"f": 1, "g": 1}, {"h": 1, "p": 1}]


def test_a_long_prompt_that_cannot_go_on_leaves_the_step_to_others() -> None:
    """The prompt would run alone, if it were not paused, or its last chunk in flight."""
    a = make(WHOLE_PROMPTS, chunks_in_flight=1, max_num_batched_tokens=20)
    long = queue(a, "p", 50)
    assert launch(a) == {"p": 20}
    running(a, "d", 4, 4)
    queue(a, "q", 3)
    assert launch(a) == {"q": 3, "d": 1}
    b = make(WHOLE_PROMPTS)
    long = running(b, "p", 50, 10)
    running(b, "d", 4, 4)
    long.paused = True
    assert step(b) == {"d": 1}
    long.paused = False
    assert step(b) == {"p": 40}


def test_prompts_wait_no_longer_than_a_decode_does_for_pages() -> None:
    """The decode is paused: nothing else would have the instance asked again."""
    a = make(PREFILL_FIRST, pages=9)
    decode = running(a, "d", 4, 4)
    prompt = running(a, "p", 5, 5)
    prompt.computed = prompt.launched = 2
    prompt.output_token_ids = []
    prompt.paused = True
    a.num_exported = 1  # Whose pages are waited for before anybody is preempted.
    assert step(a) == {}
    decode.paused, prompt.paused = True, False
    assert step(a) == {"p": 3}


def mixed(**options: Any) -> dict[str, Any]:
    return {"name": "mixed", **options}


def test_whole_prompts_beside_decodes() -> None:
    """A decode and a prompt of six leave three of ten tokens: one of five waits."""
    a = make(mixed(whole_prompts=True), max_num_batched_tokens=10)
    running(a, "d", 4, 4)
    for name, prompt_len in (("p", 6), ("q", 5), ("r", 1)):
        queue(a, name, prompt_len)
    assert [step(a), step(a)] == [{"d": 1, "p": 6}, {"d": 1, "p": 1, "q": 5, "r": 1}]


def test_a_prompt_above_the_budget_runs_alone_cut() -> None:
    a = make(mixed(whole_prompts=True), max_num_batched_tokens=10)
    queue(a, "p", 23)
    queue(a, "q", 6)
    # With three tokens left of it, q fits beside its end.
    assert [step(a) for _ in range(3)] == [{"p": 10}, {"p": 10}, {"p": 3, "q": 6}]


def test_prompts_are_cut_by_the_budget_where_they_need_not_be_whole() -> None:
    a = make("mixed", max_num_batched_tokens=10)
    running(a, "d", 4, 4)
    queue(a, "p", 12)
    assert [step(a), step(a)] == [{"d": 1, "p": 9}, {"d": 1, "p": 3}]


@pytest.mark.parametrize("steps", [1, 3])
def test_prompts_wait_so_many_steps_beside_decodes(steps: int) -> None:
    a = make(mixed(whole_prompts=True, wait_steps=steps), max_num_batched_tokens=10)
    running(a, "d", 1, 1)
    queue(a, "p", 4)
    assert [step(a) for _ in range(steps + 1)] == [{"d": 1}] * steps + [{"d": 1, "p": 4}]
    # The next one waits anew.
    queue(a, "q", 4)
    assert step(a) == {"d": 1, "p": 1}


def test_a_wait_ends_with_the_share_of_the_budget() -> None:
    """A decode and prompts of four are five of ten tokens, with the next one nine."""
    a = make(mixed(wait_steps=9, wait_share=0.9), max_num_batched_tokens=10)
    running(a, "d", 1, 1)
    queue(a, "p", 4)
    assert step(a) == {"d": 1}
    queue(a, "q", 4)
    assert step(a) == {"d": 1, "p": 4, "q": 4}


def test_prompts_do_not_wait_where_nothing_decodes() -> None:
    a = make(mixed(wait_steps=9), max_num_batched_tokens=10)
    queue(a, "p", 4)
    assert step(a) == {"p": 4}


@pytest.mark.parametrize(
    ("enough", "first"), [(5, {"d": 1, "p": 4}), (6, {"d": 1, "p": 4, "q": 4})]
)
def test_enough_tokens_may_be_overrun_by_one_prompt(enough: int, first: dict[str, int]) -> None:
    """A decode and a prompt of four are five."""
    a = make(mixed(enough_tokens=enough), max_num_batched_tokens=20)
    running(a, "d", 1, 1)
    for name in "pqr":
        queue(a, name, 4)
    assert step(a) == first


def test_a_last_prompt_is_cut_where_it_may_be() -> None:
    a = make({"name": "prefill_first", "cut_last": True}, max_num_batched_tokens=10)
    running(a, "d", 1, 1)
    queue(a, "p", 6)
    queue(a, "q", 8)
    assert [step(a) for _ in range(3)] == [
        {"p": 6, "q": 4},
        {"q": 4},
        {"d": 1, "p": 1, "q": 1},
    ]


def test_a_share_without_a_wait_is_refused() -> None:
    with pytest.raises(JaxinferError, match=r"wait_share is 0\.5, has no use without wait_steps"):
        PolicyOptions(batching=mixed(wait_share=0.5))
