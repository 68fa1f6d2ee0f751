"""``by_cache`` of four systems: off, they ask no cache; on, what a cache has costs nothing."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from jaxinfer.config.run_file import as_run_file
from jaxinfer.errors import JaxinferError
from jaxinfer.papers.cronus.balancer import CPILoad, balance, chunked_seconds
from jaxinfer.papers.cronus.system import CronusOptions
from jaxinfer.papers.distserve.system import DistServe, DistServeOptions
from jaxinfer.papers.splitwise.system import Splitwise, SplitwiseOptions
from jaxinfer.papers.takeover.system import Takeover, TakeoverOptions
from jaxinfer.serving.step_fit import DecodeFit, MixedFit, PrefillFit, StepFit
from jaxinfer.serving.system import System
from jaxinfer.serving.views import ClusterView, Counts, Leg
from jaxinfer.simulate.run import simulate
from jaxinfer.systems.by_cache import ByCacheOptions, CachedParts

FIT = StepFit(PrefillFit(0.01, 0.0), MixedFit(0.0, 0.0, 1.0), DecodeFit(0.0, 0.0, 0.1))


def view(name: str, cached: int | None, requests: int = 0) -> SimpleNamespace:
    """An instance with a queue; without a number of cached tokens, asking for it is an error."""
    return SimpleNamespace(
        name=name,
        num_requests=requests,
        waiting=[],
        importing={},
        counts=Counts(0, 0, 0, 0, 0),
        num_pages=1000,
        num_free_pages=1000,
        num_awaited_pages=0,
        page_size=16,
        max_num_batched_tokens=100,
        max_num_seqs=8,
        fit=FIT,
        cached_tokens=lambda request: {}[name] if cached is None else cached,
    )


def request(prompt_len: int = 100, computed: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        id="r",
        prompt_len=prompt_len,
        max_tokens=10,
        num_known=prompt_len,
        computed=computed,
        held_by=None,
        arrival=0.0,
    )


def legs(system: System, given: SimpleNamespace, views: Mapping[str, Any]) -> tuple[Leg, ...]:
    (assignment,) = system.route([given], ClusterView(0.0, views))  # type: ignore[list-item]
    return assignment.legs


def where(system: System, views: Mapping[str, Any], given: Any = None) -> list[str]:
    return [leg.instance for leg in legs(system, given or request(), views)]


SYSTEMS = {
    "splitwise": lambda on: Splitwise(
        SplitwiseOptions(prompt=("p", "q"), token=("d", "e"), by_cache=on)
    ),
    "distserve": lambda on: DistServe(
        DistServeOptions.model_validate(
            {"units": [{"prefill": ["p", "q"], "decode": ["d", "e"]}], "by_cache": on}
        )
    ),
    "takeover": lambda on: Takeover(TakeoverOptions(by_cache=on)),
}


@pytest.mark.parametrize("name", SYSTEMS)
def test_off_asks_no_cache(name: str) -> None:
    views = {each: view(each, None) for each in "pqde"}
    assert where(SYSTEMS[name](False), views)[0] == "p"
    with pytest.raises(KeyError):
        where(SYSTEMS[name](True), views)


@pytest.mark.parametrize("name", SYSTEMS)
def test_of_equal_queues_the_one_that_has_more_computes_the_prompt(name: str) -> None:
    views = {each: view(each, {"q": 64, "e": 48}.get(each, 0)) for each in "pqde"}
    assert where(SYSTEMS[name](True), views)[0] == "q"
    assert where(SYSTEMS[name](False), views)[0] == "p"


def test_splitwise_counts_what_is_left_to_compute() -> None:
    """A queue has what its machine must compute: 36 tokens of each prompt on q."""
    system = SYSTEMS["splitwise"](True)
    assert isinstance(system, Splitwise)
    views = {each: view(each, {"q": 64, "e": 48}.get(each, 0)) for each in "pqde"}
    assert where(system, views) == ["q", "e"]
    machines = {machine.name: machine for machine in system.pools.everyone}
    assert (machines["q"].pending, machines["p"].pending) == (36, 0)
    # The queues are 0 and 36, less the 64 cached tokens on q; then 72 less 64.
    given = request()
    given.id = "s"
    assert legs(system, given, views)[0].instance == "q"
    assert machines["q"].pending == 72
    given = request()
    given.id = "t"
    assert legs(system, given, views)[0].instance == "p"
    system.pools.prompt_done("r", views, 0.0)  # type: ignore[arg-type]
    system.pools.prompt_done("s", views, 0.0)  # type: ignore[arg-type]
    assert machines["q"].pending == 0


def test_distserve_weighs_a_cached_share_against_a_queue() -> None:
    system = SYSTEMS["distserve"]
    views = {each: view(each, 0) for each in "pqde"}
    views["q"] = view("q", 64, requests=1)  # 1 - 0.64 against 0.
    assert where(system(True), views)[0] == "p"
    views["p"] = view("p", 0, requests=1)
    assert where(system(True), views)[0] == "q"
    assert where(system(False), views)[0] == "p"


@pytest.mark.parametrize(("on", "expected"), [(False, "d"), (True, "e")])
def test_decodes_go_where_their_history_is(on: bool, expected: str) -> None:
    """The prompt is computed; the KV that a decode instance has need not be sent."""
    for name in ("splitwise", "distserve"):
        system = SYSTEMS[name](on)
        if isinstance(system, DistServe):
            where(system, {each: view(each, 0) for each in "pqde"})
        views = {each: view(each, 48 if each == "e" else 0) for each in "pqde"}
        assert where(system, views, request(computed=100)) == [expected], name


def test_takeover_adds_what_is_left_to_a_backlog() -> None:
    """Each prompt token takes 0.01 s: 100 tokens on p, or 36 behind what q has."""
    system = SYSTEMS["takeover"](True)
    assert isinstance(system, Takeover)
    views = {each: view(each, {"q": 64}.get(each, 0)) for each in "pq"}
    assert where(system, views) == ["q"]
    assert {name: book.backlog for name, book in system._books.by_name.items()} == {
        "p": 0,
        "q": 36,
    }


ROOMY = CPILoad(10**6, 16, 100, 0, 0)
# A prompt's tokens take 10 ms each on the PPI; a chunk of up to 100 takes 0.5 s on the CPI.
PREFILL, MIXED = PrefillFit(0.01, 0.0), MixedFit(0.0, 0.0, 0.5)


def cut(in_partial: int = 0, in_chunked: int = 0) -> int:
    return balance(PREFILL, MIXED, ROOMY, 1000, 1000, in_partial, in_chunked)


def test_cronus_cuts_where_both_parts_take_as_long() -> None:
    """350 tokens and seven chunks take 3.5 s; 400 tokens that the PPI's cache has take none."""
    assert cut() == 350
    assert cut(in_partial=400) == 600
    assert chunked_seconds(MIXED, ROOMY, 1000, 600) == 0.01 * (600 - 400)


def test_cronus_gives_the_cpi_what_costs_it_no_more() -> None:
    """The CPI's part is seven chunks: from 300 cached tokens on, it needs no more alone."""
    assert cut(in_chunked=299) == 350
    assert cut(in_chunked=300) == 0
    # The PPI's cache lets it compute 600 tokens; four chunks are left.
    assert cut(400, 599) == 600
    assert cut(400, 600) == 0


def test_a_fixed_cut_looks_at_no_cache() -> None:
    with pytest.raises(JaxinferError, match="by_cache has no effect on a fixed cut"):
        CronusOptions(by_cache=True, cut_tokens=0)


def test_parts() -> None:
    cluster = ClusterView(0.0, {"p": view("p", 64)})  # type: ignore[dict-item]
    given: Any = request(computed=40)
    parts = CachedParts.of(ByCacheOptions(by_cache=True), given, cluster)
    assert (parts.kept("p"), parts.spared("p"), parts.share(64)) == (64, 24, 0.64)
    off = CachedParts.of(ByCacheOptions(), given, cluster)
    assert (off.kept("p"), off.spared("p")) == (0, 0)


A100 = "A100-80G-SXM"
PAIRS = {"p0": A100, "p1": A100, "d0": A100, "d1": A100}
CASES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "splitwise": ({"prompt": ["p0", "p1"], "token": ["d0", "d1"]}, PAIRS),
    "distserve": ({"units": [{"prefill": ["p0", "p1"], "decode": ["d0", "d1"]}]}, PAIRS),
    "takeover": ({}, {"a0": A100, "a1": A100, "b0": "A10", "b1": "A10"}),
    "cronus": ({"partial": "ppi", "chunked": "cpi"}, {"ppi": "A10", "cpi": A100}),
}


@pytest.mark.parametrize("name", CASES)
def test_sessions_find_more_of_their_history(name: str) -> None:
    """Simulations of 27 sessions have at least 1.03 times as many cached tokens."""
    options, groups = CASES[name]

    def cached(on: bool) -> int:
        config = as_run_file(
            {
                "model": "llama-3-8b",
                "engine": {
                    "page_size": 16,
                    "max_num_seqs": 64,
                    "max_num_batched_tokens": 1024,
                    "max_model_len": 8192,
                },
                "groups": {group: {"kind": kind} for group, kind in groups.items()},
                "links": [
                    {"between": [a, b], "gb_s": 12.5} for a in groups for b in groups if a < b
                ],
                "instances": {group: {"group": group} for group in groups},
                "system": {"name": name, **options, "by_cache": on},
                "simulate": {"fit": "relative"},
                "workload": {
                    "synthetic": {
                        "input_len": {"kind": "uniform", "min": 100, "max": 600},
                        "output_len": 60,
                        "count": 160,
                        "sessions": {"turns": 6, "think_s": 3},
                        "prefixes": {"tokens": 500},
                    },
                    "arrivals": {"kind": "poisson", "rate": 3},
                },
            }
        )
        return simulate(config, config.requests()).cached_tokens

    assert cached(True) > 1.03 * cached(False)
