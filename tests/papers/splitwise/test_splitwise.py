"""Splitwise in the serving loop: tokens, pools and account after every event, lost machines."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from fake_world import Timing
from hypothesis import given
from hypothesis import strategies as st
from properties import examples
from scenarios import options, policy_options
from serving_checks import Outcome, Run, make_kv, make_requests, new_instance

from jaxinfer.errors import JaxinferError
from jaxinfer.papers.splitwise.system import Splitwise, SplitwiseOptions
from jaxinfer.serving.instance import Instance
from jaxinfer.serving.instance_options import InstanceOptions
from jaxinfer.serving.loop import ServingLoop
from jaxinfer.serving.policies import Policies, PolicyOptions, make_policies


def make(**options: Any) -> Splitwise:
    return Splitwise(SplitwiseOptions.model_validate(options))


def instance(name: str, pages: int = 100, policies: Policies | None = None) -> Instance:
    """Whole prompts in steps of 16 tokens, one step at a time; a page for each token."""
    whole = PolicyOptions(
        admit="whole_request", batching={"name": "whole_prompts", "step_tokens": 16}
    )
    limits = InstanceOptions(
        max_num_batched_tokens=64, max_in_flight=1, watermark=0.0, launch_ahead=False
    )
    return new_instance(name, make_kv(pages, 1), limits, policies or make_policies(whole))


def serve(
    system: Splitwise,
    names: str,
    lengths: Sequence[tuple[int, int]],
    arrivals: Sequence[float] | None = None,
    timing: Timing | None = None,
    pages: int = 100,
) -> Outcome:
    pool = [instance(name, pages) for name in names]
    timing = timing or Timing(in_order=True)
    requests = make_requests(lengths, arrivals)
    return Run(system, pool, requests, timing, watch=checks(system), greedy=False).verify()


def checks(system: Splitwise) -> Any:
    """The pools and the account, counted anew from where the requests are."""

    def watch(loop: ServingLoop) -> None:
        living, pools = loop.assignments.instances, system.pools
        names = {*system.options.prompt, *system.options.token} & living.keys()
        machines = {m.name: m for m in pools.everyone if m.name in living}
        assert len(machines) == sum(m.name in living for m in pools.everyone)
        assert machines.keys() == names
        if loop.assignments.unrouted.keys() & pools.jobs.keys():
            return  # A lost machine's requests are given anew in a moment.
        pending, decodes, promised = Counter(), Counter(), Counter()
        for request in loop.assignments.live.values():
            legs, entries = request.legs, request.prompt_len + request.max_tokens
            if legs and legs[0].until is not None:
                pending[legs[0].instance] += request.prompt_len
                if len(legs) == 1 or legs[1].instance != legs[0].instance:
                    promised[legs[0].instance] += request.prompt_len
            if legs and legs[-1].until is None:
                pending[legs[-1].instance] += 1
                decodes[legs[-1].instance] += 1
                promised[legs[-1].instance] += entries
        for name, machine in machines.items():
            found = machine.pending, machine.decodes, machine.promised
            assert found == (pending[name], decodes[name], promised[name]), name
            mixed = machine in pools.mixed
            assert mixed == machine.is_mixed
            if mixed and system.options.return_when == "opposite_done":
                prompts = pending[name] - decodes[name]
                assert prompts if machine.role == "token" else decodes[name]
            elif mixed:
                assert pending[name] or living[name].num_requests
            else:
                assert machine in (pools.prompt if machine.role == "prompt" else pools.token)
        roles = {m.name: m.role for m in machines.values()}
        wanted = dict.fromkeys(system.options.prompt, "prompt")
        wanted |= dict.fromkeys(system.options.token, "token")
        assert roles == {name: wanted[name] for name in names}

    return watch


def at_the_end(system: Splitwise) -> None:
    """The end: nobody has anything, and nobody helps."""
    pools = system.pools
    assert not pools.jobs
    assert all(not (m.pending or m.decodes or m.promised) for m in pools.everyone)


def test_options() -> None:
    assert vars(SplitwiseOptions()) == {
        "by_cache": False,
        "prompt": ("prompt",),
        "token": ("token",),
        "max_pending_tokens": 8192,
        "return_when": "opposite_done",
        "layerwise_from": 512,
    }
    system = make(prompt=["p", "q"], token="t")
    system.check("pqt")
    assert set(system.routes("pqt")) == {(a, b) for a in "pqt" for b in "pqt" if a != b}
    assert make(prompt=["p", "q"], token=[]).routes("pq") == ()
    assert not system.needs_fits
    assert not system.needs_decode_rows
    assert not system.ttft_counts_transfer
    assert system.tick_interval is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": "x"}, "prompt is 'x': known: p, t"),
        ({"prompt": ["p", "t"], "token": "t"}, "prompt and token are both 't'"),
        ({"prompt": ["p", "p"], "token": "t"}, "prompt has 'p' twice"),
        ({"prompt": []}, "prompt is [], must have at least 1 item"),
        ({"max_pending_tokens": 0}, "max_pending_tokens is 0"),
        ({"return_when": "never"}, "return_when is 'never'"),
    ],
)
def test_mistakes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(JaxinferError) as error:
        make(**options).check(["p", "t"])
    assert str(error.value).startswith(message)


def steps(outcome: Outcome) -> list[str]:
    return [
        f"{step.start:g} {step.batch.instance} "
        + " ".join(f"{r.request.id}:{r.start}+{r.count}" for r in step.batch.rows)
        for step in outcome.world.steps
    ]


def test_a_schedule() -> None:
    """Steps and transfers of a second. Both prompts fit into a step; q and t are in the pairs."""
    system = make(prompt="p", token="t")
    outcome = serve(system, "pt", [(7, 3), (9, 2), (12, 1)])
    assert steps(outcome) == [
        "0 p r0:0+7 r1:0+9",
        "1 p r2:0+12",
        "2 t r0:7+1 r1:9+1",
        "3 t r0:8+1",
    ]
    moved = [(t.requested, t.request.id, t.stop) for t in outcome.world.transfers]
    assert moved == [(1, "r0", 7), (1, "r1", 9)]
    assert system.report() == {"pools": {"p": [(0.0, "prompt")], "t": [(0.0, "token")]}}
    at_the_end(system)


def test_long_prompts_leave_layer_by_layer() -> None:
    outcome = serve(make(prompt="p", token="t", layerwise_from=8), "pt", [(7, 2), (8, 2)])
    along = {t.request.id for t in outcome.world.sent_along}
    assert along == {"r1"}
    never = serve(make(prompt="p", token="t", layerwise_from=None), "pt", [(7, 2), (8, 2)])
    assert not never.world.sent_along


def test_a_burst_of_prompts_takes_a_token_machine_and_gives_it_back() -> None:
    """The machine's decodes go on meanwhile."""
    system = make(prompt="p", token=["s", "t"], max_pending_tokens=20)
    lengths = [(4, 20), *[(16, 2)] * 4]
    outcome = serve(system, "pst", lengths, [0.0, *[5.0] * 4])
    pools = system.report()["pools"]
    assert isinstance(pools, dict)
    assert [where for _, where in pools["t"]] == ["token", "mixed", "token"]
    (_, (start, _), (stop, _)) = pools["t"]
    assert 5.0 == start < stop
    helped = [s for s in outcome.world.steps if s.batch.instance == "t" and s.batch.work.tokens > 9]
    assert helped
    assert pools["p"] == [(0.0, "prompt")]
    at_the_end(system)


def test_a_burst_of_decodes_takes_a_prompt_machine() -> None:
    """Two answers of 60 tokens fill the token machine: the third goes to a prompt machine."""
    system = make(prompt=["p", "q"], token="t")
    serve(system, "pqt", [(4, 40), (4, 40), (4, 40)])
    pools = system.report()["pools"]
    assert isinstance(pools, dict)
    assert [where for _, where in pools["p"]] == ["prompt", "mixed", "prompt"]
    assert [where for _, where in pools["q"] + pools["t"]] == ["prompt", "token"]
    at_the_end(system)


def test_under_overload_requests_run_whole() -> None:
    """The machines are mixed and full of tokens: nothing is sent."""
    system = make(prompt="p", token="t", max_pending_tokens=5)
    outcome = serve(system, "pt", [(6, 2)] * 6)
    sent = {t.request.id for t in outcome.world.transfers}
    assert sent < set(outcome.finished)
    whole = [name for name in outcome.finished if len({i for i, _ in outcome.route_of(name)}) == 1]
    assert len(whole) + len(sent) == 6
    at_the_end(system)


@examples(60)
@given(
    st.lists(
        st.tuples(st.integers(1, 16), st.integers(1, 8), st.integers(0, 12)),
        min_size=1,
        max_size=10,
    )
)
def test_without_token_machines_the_shortest_queue_is_joined(
    requests: list[tuple[int, int, int]],
) -> None:
    """The queue is the prompt tokens not yet computed, and one for each unfinished request."""
    requests.sort(key=lambda request: request[2])
    system = make(prompt=["p", "q", "r"], token=[])
    seen: dict[str, str] = {}
    route = system.route

    def watched(waiting: Any, cluster: Any) -> Any:
        """Independent of the account: as the instances have it."""
        loads = {n: i.prompt_tokens_left + i.num_requests for n, i in cluster.instances.items()}
        for request in waiting:
            seen[request.id] = min("pqr", key=lambda name: loads[name])
            loads[seen[request.id]] += request.prompt_len + 1
        return route(waiting, cluster)

    system.route = watched  # type: ignore[method-assign]
    lengths = [(p, n) for p, n, _ in requests]
    outcome = serve(system, "pqr", lengths, [float(at) for *_, at in requests])
    for name, where in seen.items():
        assert outcome.route_of(name) == [(where, outcome.finished[name].peak_tokens)]


LOSSES = [
    # What is lost when, and where the first request has been then: prompts take a second, and
    # decodes one each.
    ({"p": 0.5}, [("p", 5), ("q", 5), ("t", 5)]),
    ({"t": 0.5}, [("p", 5), ("u", 5)]),
    ({"t": 3.5}, [("p", 5), ("t", 2), ("p", 5), ("u", 5)]),
    ({"p": 3.5}, [("p", 5), ("t", 5)]),
    ({"q": 0.5, "t": 3.5, "u": 3.5}, [("p", 5), ("t", 2), ("p", 10)]),
    ({"p": 0.5, "q": 0.5, "t": 0.5}, [("p", 5), ("u", 10)]),
]


@pytest.mark.parametrize(("lost", "route"), LOSSES, ids=lambda case: str(case))
def test_lost_machines(lost: dict[str, float], route: list[tuple[str, int]]) -> None:
    """Tokens are those of one that serves alone, as in all runs here."""
    system = make(prompt=["p", "q"], token=["t", "u"])
    timing = Timing(in_order=True, lost=lost)
    outcome = serve(system, "pqtu", [(5, 6), (5, 6)], timing=timing)
    assert outcome.route_of("r0") == route
    assert {r.finish_reason for r in outcome.finished.values()} == {"length"}
    at_the_end(system)


def test_machines_that_are_back_take_a_part_again() -> None:
    """The token machine is lost with its decodes, then is back; p has served them meanwhile."""
    system = make(prompt="p", token="t")
    timing = Timing(in_order=True, lost={"t": (2.5, 20.0)})
    pool = [instance(name) for name in "pt"]
    requests = make_requests([(5, 6), (5, 6)], [0.0, 30.0])
    outcome = Run(system, pool, requests, timing, renew=instance, greedy=False).verify()
    assert outcome.route_of("r0") == [("p", 5), ("t", 1), ("p", 10)]
    assert outcome.route_of("r1") == [("p", 5), ("t", 5)]
    pools = system.report()["pools"]
    assert isinstance(pools, dict)
    assert [where for _, where in pools["t"]] == ["token", "lost", "token"]
    at_the_end(system)


@examples(60)
@given(
    lost=st.dictionaries(
        st.sampled_from("pqtu"),
        st.lists(st.integers(0, 40), min_size=1, max_size=4, unique=True).map(sorted),
        min_size=1,
    ),
    when=st.sampled_from(("opposite_done", "idle")),
    seed=st.integers(0, 10**6),
)
def test_machines_come_and_go(lost: dict[str, list[int]], when: str, seed: int) -> None:
    """No request fails as long as one of the machines is to come back."""
    system = make(prompt=["p", "q"], token=["t", "u"], max_pending_tokens=9, return_when=when)
    timing = Timing(
        seed, 3, 5, lost={name: [float(t) for t in times] for name, times in lost.items()}
    )
    lengths = [(1 + 5 * i % 16, 1 + 3 * i % 8) for i in range(9)]
    requests = make_requests(lengths, [float(4 * i) for i in range(9)])
    pool = [instance(name) for name in "pqtu"]
    outcome = Run(system, pool, requests, timing, renew=instance, greedy=False).verify()
    at_the_end(system)
    if len(lost) < 4 or any(len(times) % 2 == 0 for times in lost.values()):
        assert {r.finish_reason for r in outcome.finished.values()} == {"length"}


def test_all_are_lost() -> None:
    system = make(prompt="p", token="t")
    timing = Timing(in_order=True, lost={"p": 1.5, "t": 2.5})
    outcome = serve(system, "pt", [(5, 6)], timing=timing)
    assert outcome.finished["r0"].finish_reason == "lost"
    # Another, which the system does not name, is left.
    other = make(prompt="p", token="t")
    outcome = serve(other, "ptx", [(5, 6)], timing=timing)
    request = outcome.finished["r0"]
    assert (request.finish_reason, "'p' was lost" in str(request.error)) == ("lost", True)
    at_the_end(other)


@examples(100)
@given(data=st.data())
def test_any_options_any_machines(data: st.DataObject) -> None:
    """Small pools and policies of all kinds: requests are preempted, lost, refused and go on."""
    draw = data.draw
    names = "abcd"[: draw(st.integers(2, 4))]
    of_prompts = draw(st.integers(1, len(names)))
    system = make(
        prompt=list(names[:of_prompts]),
        token=list(names[of_prompts:]),
        max_pending_tokens=draw(st.sampled_from((1, 5, 20, 8192))),
        return_when=draw(st.sampled_from(("opposite_done", "idle"))),
        layerwise_from=draw(st.sampled_from((None, 1, 6))),
    )
    requests = draw(
        st.lists(
            st.tuples(st.integers(1, 12), st.integers(1, 10), st.integers(0, 15)),
            min_size=1,
            max_size=9,
        )
    )
    longest = max(p + n - 1 for p, n, _ in requests)
    # At times too few for the longest.
    policies = draw(policy_options())
    pool = [
        new_instance(
            name,
            make_kv(longest + draw(st.sampled_from((-1, 0, 0, 1, 4, 50))) or 1, 1),
            draw(options()),
            make_policies(policies),
        )
        for name in names
    ]
    lost = draw(st.dictionaries(st.sampled_from(names), st.integers(0, 30).map(float), max_size=3))
    stops = draw(st.dictionaries(st.integers(0, 8), st.integers(1, 10), max_size=3))
    timing = Timing(draw(st.integers(0, 10**6)), draw(st.integers(1, 4)), 6, lost=lost)
    made = make_requests([(p, n) for p, n, _ in requests], [float(at) for *_, at in requests])
    stop_at = {f"r{i}": n for i, n in stops.items() if i < len(made) and n <= made[i].max_tokens}
    watch = checks(system)
    Run(system, pool, made, timing, stop_at, watch=watch, greedy=False).verify()
    at_the_end(system)
