"""The least loaded of equal instances: by hand, and by what random choices must come to."""

from collections import Counter
from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from fake_world import Timing
from hypothesis import given
from hypothesis import strategies as st
from properties import examples
from serving_checks import Run, make_kv, make_requests, new_instance

from jaxinfer.serving.system import Assignment
from jaxinfer.serving.views import ClusterView, Leg, RequestView
from jaxinfer.systems.instances import alive, check_roles
from jaxinfer.systems.least_loaded import LeastLoaded, LeastLoadedOptions


def make(**options: Any) -> LeastLoaded:
    return LeastLoaded(LeastLoadedOptions.model_validate(options))


def chosen(
    system: LeastLoaded, there: dict[str, tuple[int, int, int]], prompts: Sequence[int]
) -> str:
    """Instances by (requests, prompt tokens left, KV entries), whose names are letters."""
    names = ("num_requests", "prompt_tokens_left", "kv_entries")
    views = {
        name: SimpleNamespace(**dict(zip(names, counts, strict=True)))
        for name, counts in there.items()
    }
    waiting = [SimpleNamespace(id=f"r{i}", prompt_len=n) for i, n in enumerate(prompts)]
    assignments = system.route(waiting, ClusterView(0.0, views))  # type: ignore[arg-type]
    assert [a.request for a in assignments] == [r.id for r in waiting]
    assert all(a.legs == (Leg(a.legs[0].instance),) for a in assignments)
    return "".join(a.legs[0].instance for a in assignments)


LOADS = {"a": (3, 10, 50), "b": (1, 500, 0), "c": (2, 0, 55)}


@pytest.mark.parametrize(
    ("load", "given"),
    [
        ("requests", "bbcabca"),  # 3 1 2, then as each has got one more.
        ("tokens", "cacacac"),  # 60 500 55, and ten more for each.
    ],
)
def test_the_shortest_queue(load: str, given: str) -> None:
    assert chosen(make(load=load), LOADS, [10] * 7) == given


def test_tokens_of_longer_prompts_count_more() -> None:
    even = dict.fromkeys("ab", (0, 0, 0))
    assert chosen(make(load="tokens"), even, [100, 30, 30, 30, 30, 5]) == "abbbba"


def test_in_turns_whatever_the_load() -> None:
    system = make(choose="round_robin")
    assert chosen(system, LOADS, [10] * 4) == "abca"
    assert chosen(system, LOADS, [10] * 2) == "bc"
    assert chosen(system, {"a": LOADS["a"], "c": LOADS["c"]}, [10] * 3) == "aca"


def test_of_two_drawn_the_one_with_less() -> None:
    """Pairs of three are as likely: the least of the loads is in two of the three."""
    there = {"a": (10**7, 0, 0), "b": (0, 0, 0), "c": (10**6, 0, 0)}
    given = Counter(chosen(make(choose="power_of_two", seed=5), there, [1] * 3000))
    assert given["a"] == 0
    assert given["b"] / 3000 == pytest.approx(2 / 3, abs=0.04)


def test_the_seed_decides() -> None:
    def draw(seed: int) -> str:
        return chosen(make(choose="power_of_two", seed=seed), LOADS, [1] * 40)

    assert draw(1) == draw(1) != draw(2)


def test_equals_go_by_their_order_and_one_alone_gets_all() -> None:
    even = dict.fromkeys("ab", (0, 0, 0))
    assert chosen(make(), even, [1] * 4) == "abab"
    for choose in ("join_shortest_queue", "power_of_two", "round_robin"):
        assert chosen(make(choose=choose), {"b": (9, 9, 9)}, [1] * 3) == "bbb"
    assert chosen(make(choose="power_of_two"), even, [1] * 2) == "ab"


def test_no_kv_goes_anywhere() -> None:
    system = make()
    system.check(["a"])
    assert (list(system.routes("ab")), system.needs_decode_rows) == ([], False)


class Watched(LeastLoaded):
    """Asserts that each request that comes alone goes where a count finds the least."""

    def route(self, waiting: Collection[RequestView], cluster: ClusterView) -> list[Assignment]:
        answer = list(super().route(waiting, cluster))
        loads = []
        for instance in cluster.instances.values():
            running = instance.running.values()
            here = [*instance.waiting, *running]
            prompts = sum(max(r.prompt_len - r.computed, 0) for r in here)
            tokens = self.options.load == "tokens"
            loads.append(sum(r.computed for r in running) + prompts if tokens else len(here))
        least = list(cluster.instances)[loads.index(min(loads))]
        assert answer[0].legs[0].instance == least
        return answer


@examples(80)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 15), st.integers(1, 8)), min_size=1, max_size=10),
    load=st.sampled_from(("requests", "tokens")),
    lost=st.dictionaries(st.sampled_from("abc"), st.integers(0, 40).map(float), max_size=2),
    gap=st.integers(0, 3),
    seed=st.integers(0, 10**6),
)
def test_random_workloads(
    lengths: list[tuple[int, int]], load: Any, lost: dict[str, float], gap: int, seed: int
) -> None:
    pool = [new_instance(name, make_kv(30, 2)) for name in "abc"]
    requests = make_requests(lengths, [float(i * gap) for i in range(len(lengths))])
    system = Watched(LeastLoadedOptions(load=load))
    outcome = Run(system, pool, requests, Timing(seed, 3, 6, lost=lost)).verify()
    assert not outcome.world.transfers
    assert all(r.finish_reason == "length" for r in outcome.finished.values())


def test_roles() -> None:
    cluster = ClusterView(0.0, dict.fromkeys("ac"))  # type: ignore[arg-type]
    assert alive("cba", cluster) == ["c", "a"]
    check_roles({"x": ["a", "b"], "y": "c"}, "abcd")
