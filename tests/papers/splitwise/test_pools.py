"""Splitwise's choices against a naive reading of its rules, and how machines change pools."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from jaxinfer.papers.splitwise.pools import Machine, MachineJob, MachinePools

CAPACITY = 100


def views(machines: dict[str, dict[str, int]]) -> Any:
    """Instances with queues as given, and pools of a hundred KV entries."""
    return {
        name: SimpleNamespace(
            waiting=[None] * given.get("queued", 0),
            num_requests=given.get("requests", 0),
            num_pages=CAPACITY // 4,
            page_size=4,
        )
        for name, given in machines.items()
    }


def naive(
    where: dict[str, list[str]],
    load: dict[str, dict[str, int]],
    prompt_len: int,
    entries: int,
    most: int,
) -> tuple[str, str]:
    """The rules one after the other, as the paper's section IV-A and its simulator have them."""

    def least(names: list[str], what: str) -> str | None:
        found = None
        for name in names:
            if found is None or load[name][what] < load[found][what]:
                found = name
        return found

    def takes_prompt(name: str | None) -> bool:
        if name is None:
            return False
        return not (load[name]["queued"] and load[name]["pending"] + prompt_len > most)

    def takes_decodes(name: str | None) -> bool:
        return name is not None and load[name]["promised"] + entries < CAPACITY

    prompt = token = None
    for pool in ("prompt", "mixed"):
        if prompt is None and takes_prompt(best := least(where[pool], "pending")):
            prompt = best
    for pool in ("token", "mixed"):
        if token is None and takes_decodes(best := least(where[pool], "promised")):
            token = best
    if (prompt or where["token"]) and (token or where["prompt"]):
        if prompt is None:
            prompt = least(where["token"], "pending")
            where["token"].remove(prompt or "")
            where["mixed"].append(prompt or "")
        if token is None:
            token = least(where["prompt"], "promised")
            where["prompt"].remove(token or "")
            where["mixed"].append(token or "")
        return prompt or "", token or ""
    everyone = [*where["prompt"], *where["mixed"], *where["token"]]
    best = least(everyone, "pending") or ""
    return best, best


@st.composite
def states(draw: st.DrawFn) -> tuple[MachinePools, dict[str, dict[str, int]], Any]:
    """Machines in any pools, with loads of which many are equal or at a limit."""
    names = "abcdef"[: draw(st.integers(2, 6))]
    of_prompts = draw(st.integers(1, len(names) - 1))
    pools = MachinePools(names[:of_prompts], names[of_prompts:], 50)
    load = {}
    for machine in pools.everyone:
        machine.decodes = draw(st.sampled_from((0, 1, 2)))
        machine.pending = machine.decodes + draw(st.sampled_from((0, 10, 30, 40, 48)))
        machine.promised = draw(st.sampled_from((0, 50, 79, 80, 100)))
        load[machine.name] = {
            "pending": machine.pending,
            "promised": machine.promised,
            "queued": draw(st.integers(0, 1)),
        }
        if draw(st.booleans()):
            own = pools.prompt if machine.role == "prompt" else pools.token
            own.remove(machine)
            pools.mixed.append(machine)
            machine.is_mixed = True
    return pools, load, views(load)


def places(pools: MachinePools) -> dict[str, list[str]]:
    return {
        "prompt": [m.name for m in pools.prompt],
        "mixed": [m.name for m in pools.mixed],
        "token": [m.name for m in pools.token],
    }


@examples(300)
@given(states(), st.sampled_from((1, 2, 10, 20, 60)), st.sampled_from((0, 20, 40)))
def test_a_pair_is_what_the_rules_say(
    state: tuple[MachinePools, dict[str, dict[str, int]], Any], prompt_len: int, output: int
) -> None:
    pools, load, instances = state
    where = places(pools)
    expected = naive(where, load, prompt_len, prompt_len + output, 50)
    found = pools.pair(prompt_len, prompt_len + output, instances, 1.0)
    assert tuple(machine.name for machine in found) == expected
    assert places(pools) == where


@examples(100)
@given(states(), st.sampled_from((1, 20, 60)))
def test_a_request_whose_prompt_is_done(
    state: tuple[MachinePools, dict[str, dict[str, int]], Any], entries: int
) -> None:
    """The machine is the one that a pair would have, where prompts have one without a move."""
    pools, load, instances = state
    where = places(pools)
    anyone = {name: given | {"queued": 0} for name, given in load.items()}
    if where["prompt"] or where["mixed"]:
        expected = naive(where, anyone, 0, entries, 50)[1]
        assert pools.for_decodes(entries, instances, 1.0).name == expected
    else:
        best = pools.for_decodes(entries, instances, 1.0)
        assert best.name in where["token"]
    assert places(pools) == where


def give(
    pools: MachinePools, request: str, instances: Any, prompt_len: int = 10
) -> tuple[str, str]:
    prompt, token = pools.pair(prompt_len, prompt_len + 5, instances, 1.0)
    pools.give(request, MachineJob(prompt_len, prompt_len + 5, prompt, token))
    return prompt.name, token.name


def counts(pools: MachinePools) -> dict[str, tuple[int, int, int]]:
    return {m.name: (m.pending, m.decodes, m.promised) for m in pools.everyone}


def test_the_account_of_a_pair() -> None:
    pools, instances = MachinePools("p", "t"), views({"p": {}, "t": {}})
    assert give(pools, "r", instances) == ("p", "t")
    assert counts(pools) == {"p": (10, 0, 10), "t": (1, 1, 15)}
    pools.prompt_done("r", instances, 2.0)
    assert counts(pools) == {"p": (0, 0, 0), "t": (1, 1, 15)}
    pools.take_back("r", instances, 3.0)
    pools.take_back("r", instances, 3.0)  # Of what is not there, nothing.
    assert counts(pools) == {"p": (0, 0, 0), "t": (0, 0, 0)}


def test_the_account_of_a_whole_request() -> None:
    """The request's KV is promised once."""
    pools, instances = MachinePools("pq", ""), views({"p": {}, "q": {}})
    assert [give(pools, name, instances) for name in "rst"] == [("p",) * 2, ("q",) * 2, ("p",) * 2]
    assert counts(pools) == {"p": (22, 2, 30), "q": (11, 1, 15)}
    pools.prompt_done("r", instances, 2.0)
    assert counts(pools)["p"] == (12, 2, 30)
    assert not pools.moves


@pytest.mark.parametrize(
    ("when", "requests", "moves"),
    [
        # Its prompt is done, whatever else it has; with all it has.
        ("opposite_done", 1, [(1.0, "t", "mixed"), (4.0, "t", "token")]),
        ("idle", 1, [(1.0, "t", "mixed")]),
        ("idle", 0, [(1.0, "t", "mixed"), (4.0, "t", "token")]),
    ],
)
def test_a_machine_helps_and_goes_back(when: Any, requests: int, moves: list[Any]) -> None:
    pools = MachinePools("p", "st", 12, return_when=when)
    instances = views({"p": {"queued": 1}, "s": {}, "t": {"requests": requests}})
    assert give(pools, "a", instances) == ("p", "s")
    assert give(pools, "b", instances)[0] == "t"  # No tokens are pending there.
    assert places(pools) == {"prompt": ["p"], "mixed": ["t"], "token": ["s"]}
    pools.prompt_done("b", instances, 4.0)
    assert pools.moves == moves
    if len(moves) == 2:  # At the end of the list.
        assert places(pools) == {"prompt": ["p"], "mixed": [], "token": ["s", "t"]}


def test_a_prompt_machine_stays_mixed_until_its_decodes_are_done() -> None:
    pools = MachinePools("pq", "t")
    instances = views({"p": {"requests": 3}, "q": {"requests": 3}, "t": {}})
    pools.token[0].promised = CAPACITY
    # Promised the least, the first of equals gives its place; it takes the prompt, too.
    assert give(pools, "a", instances) == ("p", "p")
    assert places(pools) == {"prompt": ["q"], "mixed": ["p"], "token": ["t"]}
    pools.prompt_done("a", instances, 2.0)
    assert places(pools)["mixed"] == ["p"]
    pools.take_back("a", instances, 3.0)
    assert places(pools) == {"prompt": ["q", "p"], "mixed": [], "token": ["t"]}


def test_lost_machines_are_gone_at_the_next_look() -> None:
    pools = MachinePools("pq", "tu", 5)
    instances = views({name: {"queued": 1} for name in "pqtu"})
    give(pools, "a", instances)
    assert places(pools) == {"prompt": ["p", "q"], "mixed": ["t"], "token": ["u"]}
    left = {name: instances[name] for name in "qu"}
    pools.take_back("a", left, 2.0)  # Of machines that are gone nothing is asked.
    pools.look(left, 3.0)
    assert places(pools) == {"prompt": ["q"], "mixed": [], "token": ["u"]}
    # One that is back has nothing, and its first role.
    pools.look(left | {"t": instances["t"]}, 4.0)
    assert places(pools) == {"prompt": ["q"], "mixed": [], "token": ["u", "t"]}
    assert counts(pools)["t"] == (0, 0, 0)
    assert [move[::2] for move in pools.moves if move[1] == "t"] == [
        (1.0, "mixed"),
        (3.0, "lost"),
        (4.0, "token"),
    ]


def test_one_lost_while_mixed_is_not_looked_for_when_its_work_is_taken_back() -> None:
    pools = MachinePools("p", "tu", 5)
    instances = views({name: {"queued": 1} for name in "ptu"})
    assert give(pools, "a", instances) == ("t", "t")
    pools.look({name: instances[name] for name in "pu"}, 2.0)
    pools.look(instances, 3.0)
    pools.take_back("a", instances, 4.0)
    assert places(pools) == {"prompt": ["p"], "mixed": [], "token": ["u", "t"]}
    assert all(count == (0, 0, 0) for count in counts(pools).values())


@pytest.mark.parametrize(
    ("role", "pending", "decodes", "others"),
    [
        ("prompt", 9, 0, False),
        ("prompt", 1, 1, True),
        ("token", 2, 2, False),
        ("token", 9, 2, True),
    ],
)
def test_what_is_the_other_pool_s_work(role: Any, pending: int, decodes: int, others: bool) -> None:
    assert Machine("m", role, pending, decodes).has_others_work == others
