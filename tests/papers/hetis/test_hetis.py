"""Hetis: where heads are placed, when they move, and that no token depends on it."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from fake_world import Timing
from hypothesis import given
from hypothesis import strategies as st
from properties import examples
from scenarios import options, scripts
from schedules import serve
from serving_checks import Outcome, Run, make_requests, new_instance

from jaxinfer.errors import JaxinferError
from jaxinfer.papers.hetis import system as hetis
from jaxinfer.papers.hetis.system import Hetis, HetisOptions
from jaxinfer.serving.instance import Instance
from jaxinfer.serving.instance_options import InstanceOptions
from jaxinfer.serving.kv_shards import KVShards
from jaxinfer.serving.page_pool import PagePool, Shard
from jaxinfer.serving.step_fit import AttentionFit
from jaxinfer.serving.views import ClusterView

OWN = AttentionFit(0.0, 1.0, 0.0)
NEAR = AttentionFit(0.0, 2.0, 0.0, 0.0, 10.0)
FAR = AttentionFit(0.0, 4.0, 0.0, 0.0, 20.0)


def make(**options: Any) -> Hetis:
    return Hetis(HetisOptions.model_validate(options))


def spread(
    pages: Sequence[int],
    page_size: int = 1,
    heads: int = 4,
    fits: Sequence[AttentionFit | None] = (OWN, NEAR, FAR),
    name: str = "A",
    **options: Any,
) -> Instance:
    """Return a stage on shards with these numbers of pages of a head; the first is its own."""
    shards = [
        Shard(PagePool(count + 1, page_size), tuple(range(heads)) if not i else (), 0, f"g{i}", fit)
        for i, (count, fit) in enumerate(zip(pages, fits, strict=False))
    ]
    defaults = {"max_num_batched_tokens": 64, "max_in_flight": 1, "launch_ahead": False}
    opts = InstanceOptions(**(defaults | {"watermark": 0.0} | options))
    return new_instance(name, KVShards(shards), opts)


def request(name: str = "r", known: int = 10, **more: Any) -> Any:
    return SimpleNamespace(id=name, num_known=known, **more)


def test_options() -> None:
    assert vars(make().options) == {"theta": 0.5, "placement": "time", "attention": {}}
    with pytest.raises(JaxinferError, match=r"theta is 0, must be greater than 0"):
        make(theta=0)
    assert make().routes(["A", "B"]) == ()


def hand_out(system: Hetis, instance: Instance, running: int = 1) -> list[tuple[int, ...]]:
    """Moves of a request of ten entries whose prompt has ended, one of ``running`` requests."""
    asked = request()
    hold = instance.kv.reserve(10, placement=system.place(asked, instance))
    assert hold
    asked.slices, asked.computed = [list(table) for table in hold.tables], 9
    view = SimpleNamespace(
        name="A", shards=instance.shards, page_size=1, running={"r": asked}, num_running=running
    )
    step: Any = SimpleNamespace(instance="A", rows=[SimpleNamespace(request=asked)])
    actions: Any = system.on_step(step, ClusterView(0.0, {"A": view}))  # type: ignore[dict-item]
    return [move for action in actions for move in action.moves]


@pytest.mark.parametrize(
    ("dense", "moves"),
    # Placed anew, halves take 18 + 2 * 10 beside 28.6 + 10, or 16.8 + 2 * 12 beside 28.6 + 12.
    [(10.0, [(0, 1, (2, 3))]), (12.0, [(0, 1, (3,))])],
)
def test_more_heads_leave_where_a_halfs_dense_part_hides_them(
    dense: float, moves: list[tuple[int, ...]]
) -> None:
    """Own heads of a half take 10, 20, 30, 40, near ones 10 and 20: one by one, by hand."""
    instance, system = spread([99, 99, 99]), make()
    asked: list[float] = []
    instance.shards[0].dense = lambda tokens: asked.append(tokens) or dense  # type: ignore[func-returns-value]
    assert system.place(request(), instance) == [[0, 1, 2, 3], [], []]
    assert hand_out(system, instance, running=6) == moves
    assert asked == [6, 3]


def test_a_prompt_is_attended_to_on_the_own_device_and_then_handed_out() -> None:
    """A further own head takes 10, the first remote one 10 + 20: by hand."""
    instance, system = spread([99, 99, 99]), make()
    assert system.place(request(), instance) == [[0, 1, 2, 3], [], []]
    assert hand_out(system, instance) == [(0, 1, (3,))]
    assert system.report() == {"handed_out": 1, "moved_for_time": 0, "moved_for_memory": 0}
    # With 40 entries there already: near 30, own 50 as near would, near 50, own 60 as far would.
    instance = spread([99, 99, 99])
    assert instance.kv.reserve(10, placement=[[0, 1, 2, 3], [], []])
    assert hand_out(make(), instance) == [(0, 1, (2, 3))]


@pytest.mark.parametrize("is_back", [False, True])
def test_heads_are_handed_out_to_a_shard_that_was_lost_once_it_is_back(is_back: bool) -> None:
    """Four own heads take 40, a far one 40 + 20; by the near one, as above."""
    instance = spread([99, 99, 99])
    instance.go_without((1,))
    if is_back:
        instance.go_without(())
    assert hand_out(make(), instance) == ([(0, 1, (3,))] if is_back else [])


def stages_of_two(*layers: int) -> Instance:
    """Two stages of these numbers of layers, with own devices and one that they share."""
    shards = [
        Shard(PagePool(100, 1), (4 * stage, 4 * stage + 1, 4 * stage + 2, 4 * stage + 3)[: 4 * own],
              stage, "w" if not own else f"g{stage}", OWN if own else NEAR, count)
        for stage, count in enumerate(layers) for own in (1, 0)
    ]  # fmt: skip
    return new_instance("A", KVShards(shards))


def test_a_step_of_a_pipeline_has_its_share_of_the_requests() -> None:
    """The fourth head takes 10 + 20 on the near device, 40 at home; an exchange in each of two
    steps, 20 + 20, is not worth it any more.
    """
    for_both = [(0, 1, (3,)), (2, 3, (7,))]
    assert hand_out(make(), stages_of_two(1, 1), running=1) == for_both
    assert hand_out(make(), stages_of_two(1, 1), running=2) == []


def test_dense_parts_of_all_steps_of_a_pipeline_hide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six requests in two steps: three tokens in each, or one and a half; twice their times."""
    seen: list[tuple[float, float]] = []

    def keep(loads: Any, whole: float, half: float) -> Any:
        seen.append((whole, half))
        return loads

    monkeypatch.setattr(hetis, "as_halves", keep)
    instance = stages_of_two(1, 1)
    instance.shards[2].dense = lambda tokens: 10 + tokens
    hand_out(make(), instance, running=6)
    assert set(seen) == {(2 * 13.0, 2 * 11.5)}


def test_room_is_made_on_a_device_besides_the_own_one() -> None:
    """Four slices of 10 entries fill the near device; one of them goes home, where there is room.

    One step of the far one, 20 + 40, would take longer than the 10 at home.
    """
    instance, system = spread([99, 40, 99]), make(theta=99)
    hold = instance.kv.reserve(10, placement=[[], [0, 1, 2, 3], []])
    assert hold
    asked = request(arrival=0.0, slices=[list(table) for table in hold.tables])
    view: Any = SimpleNamespace(
        name="A", shards=instance.shards, page_size=1, running={"r": asked}, num_running=1
    )
    (action,) = system.make_room(asked, 1, view)
    assert action.moves == ((1, 0, (0,)),)


@pytest.mark.parametrize(("growing", "moves"), [(4, [((0, 1, (0,)),)]), (0, [])])
def test_the_ideal_has_to_hold_what_grows(growing: int, moves: list[Any]) -> None:
    """40 entries fill the own pool, for 40; one head on the near device takes 100 + 20.

    That is three times what all would take at home, where four more entries have no room.
    """
    instance = spread([40, 99], fits=(OWN, AttentionFit(0.0, 2.0, 0.0, 0.0, 100.0)))
    hold = instance.kv.reserve(10, placement=[[0, 1, 2, 3], []])
    assert hold
    there = request(arrival=0.0, slices=[list(table) for table in hold.tables])
    asks = request("asks", slices=[list(range(growing)), []])
    view: Any = SimpleNamespace(
        name="A", shards=instance.shards, page_size=1, running={"r": there}, num_running=1
    )
    assert [action.moves for action in make().make_room(asks, 0, view)] == moves


@pytest.mark.parametrize(("layers", "moves"), [(8, [(0, 1, (3,))]), (4, [])])
def test_what_a_device_does_for_other_stages_counts(
    layers: int, moves: list[tuple[int, ...]]
) -> None:
    """A layer of the other stage takes it 40, and of these comes 1 for 8 or 4 of the first's: the
    fourth head takes 10 + 20 + 5 or 10 + 20 + 10 there, 40 at home.

    The second stage has more of its own already: 20 + 60 there, 50 and more at home.
    """
    instance = stages_of_two(layers, 1)
    assert instance.kv.reserve(10, placement=[[], [0, 1, 2, 3], [], [4, 5, 6, 7]]) is not None
    instance.shards[1].num_pairs = 0
    instance.shards[1].pool.give([0] * 40)
    instance.shards[3].num_pairs = 2
    instance.shards[3].pool.give([0] * 20)
    assert hand_out(make(), instance) == moves


def test_heads_go_where_there_is_room() -> None:
    assert make().place(request(), spread([25, 9, 25])) == [[0, 1], [], [2, 3]]
    assert make().place(request(), spread([19, 19, 15])) is None
    assert make(placement="memory").place(request(), spread([25, 9, 90])) == [[], [], [0, 1, 2, 3]]


def test_each_stage_is_placed_by_itself() -> None:
    shards = [
        Shard(PagePool(100, 1), (0, 1), 0, "a", OWN),
        Shard(PagePool(100, 1), (), 0, "w", FAR),
        Shard(PagePool(12, 1), (2, 3), 1, "b", OWN),
        Shard(PagePool(100, 1), (), 1, "w", FAR),
    ]
    instance = new_instance("A", KVShards(shards))
    assert make().place(request(), instance) == [[0, 1], [], [2], [3]]


def test_a_device_works_for_another_stage_only_where_it_is_the_same_one() -> None:
    """The first of a group's two devices has all that the group has of the second stage."""
    shards = [
        Shard(PagePool(100, 1), (0, 1), 0, "a", OWN),
        Shard(PagePool(100, 1), (), 0, "w", FAR, device=0),
        Shard(PagePool(100, 1), (), 0, "w", FAR, device=1),
        Shard(PagePool(100, 1), (2, 3), 1, "b", OWN),
        Shard(PagePool(100, 1), (), 1, "w", FAR, device=0),
        Shard(PagePool(100, 1), (), 1, "w", FAR, device=1),
    ]
    instance = new_instance("A", KVShards(shards))
    shards[4].num_pairs = 2
    shards[4].pool.take(20)
    _, first, second = make()._loads(instance, [0, 1, 2])
    assert first.others == FAR.busy(2, 20) > 0
    assert second.others == 0


def test_figures_may_be_given_and_must_be_there() -> None:
    unknown = spread([39, 99], fits=(OWN, None))
    with pytest.raises(JaxinferError, match=r"^system\.attention\.g1 is missing"):
        make().place(request(), unknown)
    fast = {"per_pair": 0, "per_entry": 0.4, "exchange": 0.0}
    assert make(attention={"g1": fast}).place(request(), unknown) == [[0], [1, 2, 3]]
    # They take the place of those that are known.
    assert make().place(request(), spread([39, 99])) == [[0, 1, 2], [3]]
    assert make(attention={"g1": fast}).place(request(), spread([39, 99])) == [[0], [1, 2, 3]]


def test_a_request_goes_where_the_largest_share_is_free() -> None:
    there = {"A": spread([40, 60]), "B": spread([90, 110], name="B")}
    waiting = [request(f"r{i}", 10, prompt_len=10, max_tokens=2, arrival=0.0) for i in range(4)]
    assignments = make().route(waiting, ClusterView(0.0, there))  # type: ignore[arg-type]
    # Of 20 and 45 pages per head: 20/20, 45/45, then 35/45 and 25/45 rather than 10/20.
    assert [a.legs[0].instance for a in assignments] == ["A", "B", "B", "B"]
    # Who is too small for a request does not get it.
    (only,) = make().route([request("r", 30, prompt_len=30, max_tokens=2)], ClusterView(0.0, there))  # type: ignore[arg-type, list-item]
    assert only.legs[0].instance == "B"


def burst(
    system: Hetis, pages: Sequence[int], lengths: Sequence[tuple[int, int]], **run: Any
) -> tuple[Outcome, Instance]:
    instance = spread(pages, **run)
    return serve(system, [instance], lengths), instance


def preempted(outcome: Outcome) -> int:
    return sum(r.metrics.num_preemptions for r in outcome.finished.values())


def test_a_burst_spreads_and_the_slower_device_gets_fewer() -> None:
    """The spread is seen in the middle of the run of eight: the slower device has fewer heads."""
    most = [0, 0, 0]

    def run(lengths: Sequence[tuple[int, int]]) -> list[int]:
        instance = spread([999, 999, 999])

        def watch(loop: object) -> None:
            for i, shard in enumerate(instance.shards):
                most[i] = max(most[i], shard.num_pairs)

        most[:] = 0, 0, 0
        serve(make(), [instance], lengths, watch=watch)
        return most

    own, near, far = run([(20, 10)] * 8)
    assert own > near > far > 0
    # With little to do all heads stay: four of 2 entries take less than the exchange.
    assert run([(1, 2)]) == [4, 0, 0]


def test_pools_together_hold_what_the_own_one_does_not() -> None:
    """Requests of 1.9 times the own pool's entries fit all pools; alone, it preempts some."""
    lengths = [(10, 28)] * 4  # 37 entries of 4 heads at the end: 592 pages.
    together, _ = burst(make(), [312, 180, 180], lengths)
    assert preempted(together) == 0
    alone, _ = burst(make(), [312], lengths)
    assert preempted(alone) > 0


def test_a_request_on_a_full_device_moves_and_is_not_preempted() -> None:
    """The own pool is full first: 3 of 4 heads start there, and there is room elsewhere."""
    lengths = [(10, 30), (10, 30)]
    system = make()
    outcome, _ = burst(system, [90, 200, 300], lengths)
    assert preempted(outcome) == 0
    assert system.report()["moved_for_memory"] > 0  # type: ignore[operator]
    stays = make(theta=None)
    outcome, _ = burst(stays, [90, 200, 300], lengths)
    assert preempted(outcome) > 0
    moved = stays.report()
    assert (moved["moved_for_time"], moved["moved_for_memory"]) == (0, 0)


def test_a_stage_that_is_too_slow_is_relieved_and_then_left_alone() -> None:
    """Short requests fill the near device; their end leaves a long one where it is too slow."""
    system = make()
    lengths = [(60, 9)] * 3 + [(60, 60)]
    outcome, _ = burst(system, [999, 999, 999], lengths)
    moved = system.report()["moved_for_time"]
    assert isinstance(moved, int)
    assert 0 < moved <= 4
    assert preempted(outcome) == 0
    # Those before are of prompts that were done.
    moves = [t.slice_move for t in outcome.world.transfers][-moved:]
    assert all(move and move.request == "r3" for move in moves)


def test_a_constant_load_is_left_alone() -> None:
    """Equal requests that stay: placed once, nothing is to be gained by moves."""
    system = make(theta=0.01)
    outcome, _ = burst(system, [9999, 9999, 9999], [(50, 40)] * 6, max_num_seqs=6)
    assert system.report()["moved_for_time"] <= 6  # type: ignore[operator]
    assert preempted(outcome) == 0


@given(
    st.data(),
    st.sampled_from((0.05, 0.5, None)),
    st.sampled_from(("time", "memory")),
    st.integers(0, 2**16),
)
@examples(60)
def test_every_request_ends_with_its_tokens(
    data: st.DataObject, theta: float | None, placement: str, seed: int
) -> None:
    """Random pools that hold each request alone, random times; the fake world checks all cells."""
    requests = data.draw(st.lists(scripts(["A"], 1), min_size=1, max_size=6))
    size, heads = data.draw(st.sampled_from((1, 3))), data.draw(st.sampled_from((1, 2, 3)))
    needed = -(-max(r.peak for r in requests) // size)
    own = data.draw(st.integers(1, heads * needed + 9))
    near = data.draw(st.integers(max(heads * needed - own, 1), heads * needed + 9))
    far = data.draw(st.integers(1, 30))
    if sum(count // needed for count in (own, near, far)) < heads:
        near += heads * needed
    opts = vars(data.draw(options()))
    instance = spread((own, near, far), size, heads, **opts)
    system = make(theta=theta, placement=placement)
    timing = Timing(seed, max_step=3, max_transfer=data.draw(st.sampled_from((1, 9))))
    lengths, arrivals = (
        [(r.prompt_len, r.max_tokens) for r in requests],
        [r.arrival for r in requests],
    )
    states = make_requests(lengths, arrivals)
    Run(system, [instance], states, timing).verify()
