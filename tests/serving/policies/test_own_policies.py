"""Names and options of policies, and functions and classes of one's own."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from policy_cases import Instant

from jaxinfer.config.engine import EngineOptions
from jaxinfer.errors import JaxinferError
from jaxinfer.serving.batch_builder import BatchBuilder
from jaxinfer.serving.instance import Instance
from jaxinfer.serving.policies import Policies, PolicyOptions, make_policies
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.views import Leg


def own(waiting: Sequence[RequestState]) -> RequestState:
    return waiting[-1]


def fails(waiting: Sequence[RequestState]) -> RequestState:
    raise KeyError("nothing")


def astray(waiting: Sequence[RequestState]) -> str:
    return "r0"


def answers_three(*asked: object) -> int:
    return 3


def takes(count: int, times: int = 1) -> Callable[[BatchBuilder], None]:
    """A policy that adds a row of ``count`` tokens of the first request, ``times`` times."""

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
