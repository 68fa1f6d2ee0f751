"""TetriInfer: windows, chunks, two choices by predicted length, books, flips, losses."""

import math
import random
from collections.abc import Sequence
from itertools import accumulate
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
from fake_world import Timing
from hypothesis import given
from hypothesis import strategies as st
from properties import examples
from serving_checks import Outcome, Run, make_kv, make_requests, new_instance

from jaxinfer.errors import JaxinferError
from jaxinfer.papers.tetriinfer.dispatch import DecodeLoad, LoadReports, choose, least_output
from jaxinfer.papers.tetriinfer.role_flips import Flips
from jaxinfer.papers.tetriinfer.sorted_queue import Windows, in_order
from jaxinfer.papers.tetriinfer.system import TetriInfer, TetriInferOptions
from jaxinfer.serving.instance import Instance
from jaxinfer.serving.instance_options import InstanceOptions
from jaxinfer.serving.loop import ServingLoop
from jaxinfer.serving.policies import PolicyOptions, make_policies
from jaxinfer.serving.request_state import RequestState

DISPATCHES = ("two_choices", "ratio", "random", "imbalance")
ORDERS = ("sjf", "ljf", "fcfs")


def make(**options: Any) -> TetriInfer:
    return TetriInfer(TetriInferOptions.model_validate(options))


def instance(name: str, pages: int = 100, **options: Any) -> Instance:
    defaults = {"max_num_batched_tokens": 5, "max_in_flight": 1, "watermark": 0.0}
    return new_instance(name, make_kv(pages, 1), InstanceOptions(**(defaults | options)))


def serve(
    system: TetriInfer,
    pool: Sequence[Instance],
    requests: Sequence[RequestState],
    timing: Timing | None = None,
    **run: Any,
) -> Outcome:
    return Run(system, pool, requests, timing or Timing(in_order=True), **run).verify()


# Windows of prompts.


def prompts(lengths: Sequence[int]) -> list[Any]:
    return [SimpleNamespace(id=f"r{i}", prompt_len=n) for i, n in enumerate(lengths)]


def taken(lengths: Sequence[int], size: int, order: Any, budget: int = 10**9) -> list[int]:
    """Prompts as they leave one queue, all at once."""
    there = prompts(lengths)
    view = SimpleNamespace(
        prompt_tokens_left=0, max_num_batched_tokens=budget, num_pages=10**6, page_size=1
    )
    cluster: Any = SimpleNamespace(instances={"p": view})
    windows = Windows(size, order)
    windows.keep(["p"])
    for request in there:
        windows.add(request, cluster)
    left = [r for _, r in windows.take({r.id: r for r in there}, cluster)]
    assert len(windows.requests()) == len(lengths) - len(left)
    return [request.prompt_len for request in left]


@pytest.mark.parametrize(
    ("order", "expected"),
    [("sjf", [1, 5, 9, 2, 3, 4]), ("ljf", [9, 5, 1, 4, 3, 2]), ("fcfs", [5, 9, 1, 4, 2, 3])],
)
def test_sorted_within_each_window(order: str, expected: list[int]) -> None:
    assert taken([5, 9, 1, 4, 2, 3], 3, order) == expected


def test_equal_prompts_keep_their_order() -> None:
    for order in ORDERS:
        found = in_order(prompts([3, 3, 3]), order)  # type: ignore[arg-type]
        assert [r.id for r in found] == ["r0", "r1", "r2"]


def test_a_window_at_a_time_while_there_is_too_little_to_do() -> None:
    """Two steps of ten tokens: one window has 18, the next makes it enough."""
    assert taken([6] * 12, 3, "fcfs", budget=10) == [6] * 6
    assert taken([6] * 12, 4, "fcfs", budget=10) == [6] * 4


@pytest.mark.parametrize("size", [4, 16, 64])
def test_mean_completion_is_the_closed_form(size: int) -> None:
    """The mean, in mean prompts, of N in windows of B is (N+1)/2, or 1 + (B-1)/2 mu + (N-B)/2.

    The first holds for arrival order, the second for shortest first, with mu = E[min(X, X')] /
    E[X]; longest first has 2 - mu for mu. Mean over shuffles.
    """
    rng, count = random.Random(0), 64
    lengths = [rng.randint(1, 400) for _ in range(count)]
    pairs = [min(a, b) for i, a in enumerate(lengths) for b in lengths[:i]]
    mu = fmean(pairs) / fmean(lengths)
    for order, factor in (("fcfs", 1.0), ("sjf", mu), ("ljf", 2 - mu)):
        means = []
        for _ in range(150):
            rng.shuffle(lengths)
            done = list(accumulate(taken(lengths, size, order)))
            means.append(fmean(done) / fmean(lengths))
        form = 1 + (size - 1) / 2 * factor + (count - size) / 2
        assert fmean(means) == pytest.approx(form, rel=0.02), order


def test_prompts_are_one_stream_of_chunks() -> None:
    """Every step but the last is full, across prompts and windows."""
    requests = make_requests([(n, 1) for n in (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5)])
    outcome = serve(make(prefill_batch=3), [instance("prefill"), instance("decode")], requests)
    counts = [sum(row.count for row in step.batch.rows) for step in outcome.world.steps]
    assert counts == [5] * 8 + [4]
    order = [row.request.prompt_len for step in outcome.world.steps for row in step.batch.rows]
    assert list(dict.fromkeys(order)) == [1, 3, 4, 5, 9, 2, 6]  # Each window sorted.


def test_the_queue_with_the_fewest_tokens() -> None:
    system = make(prefill=["p", "q"], decode="d", order="fcfs")
    requests = make_requests([(9, 1), (2, 1), (3, 1), (3, 1), (2, 1)])
    outcome = serve(system, [instance(name) for name in "pqd"], requests)
    where = [outcome.route_of(f"r{i}")[0][0] for i in range(5)]
    assert where == ["p", "q", "q", "q", "q"]


# Who decodes.


def test_least_output() -> None:
    def of(predicted: tuple[int, int] | None) -> int:
        return least_output(SimpleNamespace(max_tokens=300, predicted=predicted))  # type: ignore[arg-type]

    assert [of((200, 400)), of((0, 200)), of((400, 600)), of(None)] == [200, 0, 300, 300]


@given(
    rooms=st.lists(st.integers(-5, 40), min_size=1, max_size=6),
    entries=st.integers(1, 40),
    heavy=st.booleans(),
    rule=st.sampled_from(DISPATCHES),
    seed=st.integers(0, 100),
)
def test_who_has_room_comes_first(
    rooms: list[int], entries: int, heavy: bool, rule: Any, seed: int
) -> None:
    loads = {str(n): DecodeLoad(room, n % 3, n % 2) for n, room in enumerate(rooms)}
    name = choose(loads, entries, heavy, rule, random.Random(seed))
    if any(room >= entries for room in rooms):
        assert loads[name].room >= entries
    elif len(rooms) > 1:
        # The better of two, so never the worst alone.
        assert rooms[int(name)] > min(rooms) or rooms.count(min(rooms)) > 1


@pytest.mark.parametrize(
    ("rule", "heavy", "name"),
    [
        ("two_choices", True, "b"),
        ("two_choices", False, "a"),
        ("imbalance", True, "a"),
        ("imbalance", False, "b"),
        ("ratio", True, "b"),
        ("ratio", False, "b"),
    ],
)
def test_the_rules(rule: Any, heavy: bool, name: str) -> None:
    """a has 4 heavy and 2 light ones, b has 3 and 5."""
    loads = {"a": DecodeLoad(99, 4, 2), "b": DecodeLoad(99, 3, 5)}
    assert {choose(loads, 9, heavy, rule, random.Random(seed)) for seed in range(9)} == {name}


def test_two_choices_balance_as_balls_in_bins() -> None:
    """The fullest of n bins has log log n / log 2 + O(1) more than the mean; of one draw, more."""
    count = 400
    most = {}
    for rule in ("two_choices", "random"):
        rng, loads = random.Random(1), {str(n): DecodeLoad(10**9) for n in range(count)}
        for _ in range(count):
            loads[choose(loads, 1, True, rule, rng)].give(1, True)  # type: ignore[arg-type]
        most[rule] = max(load.heavy for load in loads.values())
    assert most["two_choices"] <= math.log2(math.log(count)) + 1.5
    assert most["random"] > most["two_choices"]


def view(name: str, free: int, pages: int = 100) -> Any:
    return SimpleNamespace(name=name, num_free_pages=free, num_pages=pages, page_size=1)


def request(name: str, prompt: int, low: int) -> Any:
    return SimpleNamespace(id=name, prompt_len=prompt, max_tokens=500, predicted=(low, low + 200))


def test_books_go_by_the_last_report_and_what_was_given_since() -> None:
    ledger = LoadReports()
    ledger.report([view("a", 100), view("b", 70)])
    assert ledger.place(request("r", 20, 40), ["a"], 30, "two_choices") == "a"
    assert ledger.place(request("s", 10, 0), ["a"], 30, "two_choices") == "a"
    assert ledger.reports == {"a": DecodeLoad(30, 1, 1), "b": DecodeLoad(70)}
    ledger.forget("r")
    assert ledger.reports["a"] == DecodeLoad(30, 1, 1)  # Until the next report.
    ledger.report([view("a", 95), view("b", 5)])
    assert ledger.reports == {"a": DecodeLoad(90, 0, 1), "b": DecodeLoad(5)}
    ledger.forget("s")
    ledger.forget("nobody")
    ledger.report([view("a", 95)])
    assert ledger.reports == {"a": DecodeLoad(95)}


# Flips.


ROLES = {"prefill": ["p", "q"], "decode": ["d", "e"]}


def flips_of(flips: Flips, idle: dict[int, str], until: int) -> dict[int, tuple[str, str]]:
    """Return the flips by time, with a report every second; ``idle`` says who idles from when."""
    found, who = {}, ""
    for now in range(until):
        who = idle.get(now, who)
        flips.watch("pqde", who, now)
        if flip := flips.next(ROLES, now):
            found[now] = flip
    return found


def test_who_is_idle_for_long_flips() -> None:
    # Looked back on 10 s: from the eleventh report on. Then it is not in this role any more.
    assert flips_of(Flips(10, 0.0), {0: "p"}, 15) == {10: ("p", "decode")}
    assert flips_of(Flips(10, 0.0), {0: "p", 4: "", 5: "p"}, 18) == {15: ("p", "decode")}
    assert flips_of(Flips(10, 0.1), {0: "p", 4: "", 5: "p"}, 15) == {10: ("p", "decode")}
    assert flips_of(Flips(10, 0.0), {0: "e"}, 15) == {10: ("e", "prefill")}
    assert flips_of(Flips(None, 0.0), {0: "p"}, 99) == {}


def test_nobody_goes_where_somebody_is_idle_now_and_then() -> None:
    assert flips_of(Flips(10, 0.0), {0: "pd"}, 30) == {}
    assert flips_of(Flips(10, 0.0), {0: "p", 7: "pd", 8: "p"}, 17) == {}
    assert flips_of(Flips(10, 0.0), {0: "p", 7: "pd", 8: "p"}, 19) == {18: ("p", "decode")}
    assert flips_of(Flips(10, 0.1), {0: "p", 7: "pd", 8: "p"}, 19) == {10: ("p", "decode")}


def test_nobody_leaves_who_is_the_last() -> None:
    flips = Flips(10, 0.0)
    for now in range(12):
        flips.watch("qde", "q", now)
        assert flips.next({"prefill": ["q"], "decode": ["d", "e"]}, now) is None


def four() -> list[Instance]:
    return [instance(name, max_num_seqs=4) for name in "pqde"]


def two_phases() -> list[RequestState]:
    """Long prompts, then long answers."""
    lengths = [(40, 2)] * 6 + [(2, 30)] * 12
    return make_requests(lengths, [0.0] * 6 + [60.0 + 3 * i for i in range(12)])


def test_a_load_that_shifts_flips_and_a_steady_one_does_not() -> None:
    system = make(prefill=["p", "q"], decode=["d", "e"], flip_after_s=5, report_s=1)
    pool = four()
    outcome = serve(system, pool, two_phases())
    flips: Any = system.report()["flips"]
    assert flips[0]["role"] == "prefill"  # While there are only prompts.
    late = [each for each in flips if each["asked"] > 60]
    assert {each["role"] for each in late} == {"decode"}
    assert {"p", "q"} & {each["instance"] for each in late}
    decoded = {
        batch.instance
        for batch in outcome.world.batches
        for row in batch.rows
        if row.start >= row.request.prompt_len
    }
    assert {"p", "q"} & decoded
    steady = make(prefill=["p", "q"], decode=["d", "e"], flip_after_s=5, report_s=1)
    serve(steady, four(), make_requests([(10, 10)] * 30, [3.0 * i for i in range(30)]))
    # Not to and fro: the one that this load has no use for.
    (flip,) = steady.report()["flips"]  # type: ignore[misc]
    assert flip["role"] == "decode"


def test_no_flips_where_none_are_wanted() -> None:
    system = make(prefill=["p", "q"], decode=["d", "e"], flip_after_s=None)
    serve(system, four(), two_phases())
    assert system.report() == {"flips": []}


# Failures, and everything at random.


def test_options() -> None:
    system = make(prefill=["p", "q"], decode="d", report_s=0.5)
    system.check("pqd")
    assert system.tick_interval == 0.5
    assert not system.needs_decode_rows
    assert not system.ttft_counts_transfer
    assert set(system.routes("pd")) == {("p", "d"), ("d", "p")}  # Roles change.
    still = make(prefill=["p", "q"], decode="d", flip_after_s=None)
    assert still.routes("pqd") == [("p", "d"), ("q", "d")]
    with pytest.raises(JaxinferError, match="prefill and decode are both 'p'"):
        make(prefill="p", decode="p").check("p")
    with pytest.raises(JaxinferError, match=r"dispatch is 'best'"):
        make(dispatch="best")


def test_what_no_decode_pool_holds_is_refused_before_its_prefill() -> None:
    outcome = serve(
        make(), [instance("prefill"), instance("decode", 20)], make_requests([(5, 4), (5, 20)])
    )
    assert [r.finish_reason for r in outcome.finished.values()].count("error") == 1
    assert not outcome.route_of("r1")


def test_a_lost_decode_instance_s_requests_start_again() -> None:
    timing = Timing(in_order=True, lost={"d": 12.5})
    system = make(prefill="p", decode=["d", "e"], flip_after_s=None)
    outcome = serve(system, [instance(n) for n in "pde"], make_requests([(5, 30)] * 4), timing)
    assert all(r.finish_reason == "length" for r in outcome.finished.values())
    again = [n for n in outcome.finished if [w for w, _ in outcome.route_of(n)].count("p") == 2]
    assert again
    assert all(outcome.route_of(name)[-1][0] == "e" for name in outcome.finished)


def test_a_lost_prefill_instance_with_kv_that_was_not_fetched() -> None:
    timing = Timing(in_order=True, lost={"p": 4.5})
    system = make(prefill=["p", "q"], decode="d", flip_after_s=None, order="fcfs")
    pool = [instance("p"), instance("q"), instance("d", 30, max_num_seqs=1)]
    outcome = serve(system, pool, make_requests([(5, 8)] * 6), timing)
    assert all(r.finish_reason == "length" for r in outcome.finished.values())
    assert any([w for w, _ in outcome.route_of(n)][:2] == ["p", "q"] for n in outcome.finished)


LENGTHS = st.lists(
    st.tuples(st.integers(1, 15), st.integers(1, 12), st.none() | st.integers(0, 12)),
    min_size=1,
    max_size=10,
)


@examples(40)
@given(
    lengths=LENGTHS,
    size=st.integers(1, 4),
    order=st.sampled_from(ORDERS),
    dispatch=st.sampled_from(DISPATCHES),
    admit=st.sampled_from(("greedy", "reserve_static", "reserve_dynamic")),
    idle=st.none() | st.integers(1, 6),
    lost=st.dictionaries(st.sampled_from("pqde"), st.integers(0, 40).map(float), max_size=3),
    gap=st.integers(0, 8),
    seed=st.integers(0, 10**6),
)
def test_everyone_is_served_whatever_flips_and_whoever_is_lost(
    lengths: list[tuple[int, int, int | None]],
    size: int,
    order: str,
    dispatch: str,
    admit: str,
    idle: int | None,
    lost: dict[str, float],
    gap: int,
    seed: int,
) -> None:
    """Tokens are one instance's; no role is left by its last instance of its own accord."""
    system = make(
        prefill=["p", "q"], decode=["d", "e"], prefill_batch=size, order=order, report_s=1,
        dispatch=dispatch, heavy_decode=4, flip_after_s=idle, seed=seed,
    )  # fmt: skip
    policies = PolicyOptions(admit={"name": admit, "bound": "low"} if admit != "greedy" else admit)
    options = InstanceOptions(max_num_batched_tokens=5, watermark=0.0)
    pool = [new_instance(name, make_kv(30, 1), options, make_policies(policies)) for name in "pqde"]
    requests = make_requests(
        [(prompt, output) for prompt, output, _ in lengths],
        [float(gap * i) for i in range(len(lengths))],
    )
    for each, (_, _, low) in zip(requests, lengths, strict=True):
        each.predicted = None if low is None else (low, low + 4)

    def watch(loop: ServingLoop) -> None:
        if not loop.assignments.losses.lost:
            began = {"p": "prefill", "q": "prefill", "d": "decode", "e": "decode"}
            roles = [i.role or began[i.name] for i in pool if not i.draining]
            assert {"prefill", "decode"} <= set(roles)

    timing = Timing(seed, 3, 6, lost=lost)
    outcome = Run(system, pool, requests, timing, watch=watch, greedy=admit == "greedy").verify()
    assert all(r.finish_reason == "length" for r in outcome.finished.values())
    assert not system._prefilled
    assert not system._windows.requests()
    assert not system._ledger._given
