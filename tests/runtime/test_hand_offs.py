"""Hand-offs between two instances: long prompts, options, stops, links, dtypes, segments."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cluster_cases import (
    KINDS_A,
    KINDS_B,
    LENGTHS,
    PAIRS,
    PEAK,
    RULES,
    G,
    H,
    Loader,
    Request,
    Way,
    cut_option,
    make_requests,
    roomy,
    set_pools,
    set_system,
)
from cluster_checks import (
    REQUESTS,
    ROUNDING,
    Done,
    Ran,
    check_hand_offs,
    check_transfers,
    serve,
    token_bytes,
)
from waiting import wait_until

from jaxinfer import LLM, SamplingParams
from jaxinfer.serving.batch import Batch


def cronus(partial: str, chunked: str, cut: float, rule: str = "on_demand") -> dict[str, Any]:
    ends = {"partial": partial, "chunked": chunked}
    return {"name": "cronus", **ends, **cut_option(cut), "hand_off": rule}


@pytest.mark.slow
def test_instances_whose_stages_lie_on_the_same_two_groups(
    loader: Loader, expected: dict[str, list[Done]], tmp_path: Path
) -> None:
    """Stages have as many devices as their groups give them: layers go from one to two."""
    x = [{"group": "g", "layers": 1}, {"group": "h", "layers": 3}]
    y = [{"group": "h", "layers": 2}, {"group": "g", "layers": 2}]
    instances = {"x": {"stages": x} | roomy(16), "y": {"stages": y} | roomy(8)}
    groups = {"g": G, "h": H}
    llm = loader.load("three", groups=groups, instances=instances, verify_transfers=True)
    for source, dest in (("x", "y"), ("y", "x")):
        for cut, rule in ((33, "on_demand"), (1.0, "per_chunk"), (0.98, "at_end")):
            llm.reset_prefix_cache()
            set_system(llm, cronus(source, dest, cut, rule))
            assert serve(llm, run_dir=tmp_path / "runs") == expected["three"]
            ran = Ran.last(tmp_path / "runs")
            check_transfers(ran, token_bytes("three"))
            check_hand_offs(ran, Way(f"cronus_{source}_{dest}", cut, rule, "", "on"))


@pytest.fixture
def plain(loader: Loader) -> LLM:
    """The tests below change what is asked of one pair."""
    llm = loader.pair(PAIRS[0])
    llm.reset_prefix_cache()
    return llm


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("cut", [1, 255, 256, 257, 299, 300])
def test_a_long_prompt_goes_in_several_slabs(
    plain: LLM, alone: dict[str, LLM], cut: int, rule: str, tmp_path: Path
) -> None:
    requests = make_requests([(300, 20)])
    set_system(plain, cronus("a", "b", cut, rule))
    assert serve(plain, requests, tmp_path) == serve(alone["two"], requests)
    ran = Ran.last(tmp_path)
    moved = ran.moved(0)
    check_transfers(ran, token_bytes("two"))
    # With nobody else about, nothing is sent twice.
    assert sum(moved) == cut
    assert len(moved) == 1 or rule in ("per_chunk", "per_segment")
    assert (ran.prefilled("a"), ran.prefilled("b")) == (cut, 300 - cut)
    assert (ran.decoded("a"), ran.decoded("b")) == (0, 19)
    assert [request.cut for request in ran.requests] == [cut]


def hold_up(
    monkeypatch: pytest.MonkeyPatch, llm: LLM, instance: str, stop: int, there: Callable[[], object]
) -> None:
    """A step that computes a prompt up to ``stop`` does not end before something is there."""
    stage = llm.cluster.engines[instance].worker.stages[-1]
    end_of = stage.end_of

    def late(batch: Batch, start: float) -> float:
        if any(row.start + row.count == stop for row in batch.rows):
            wait_until(there)
        return end_of(batch, start)

    monkeypatch.setattr(stage, "end_of", late)


def slabs_placed(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> list[Any]:
    """Return the slabs that have come from ``a`` to ``b``, as they come."""
    placed: list[Any] = []
    channel = llm.cluster.channels["a", "b"]
    place = channel.place
    monkeypatch.setattr(channel, "place", lambda landed: placed.append(landed) or place(landed))
    return placed


def test_chunks_are_sent_while_the_next_ones_are_computed(
    plain: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_system(plain, cronus("a", "b", 300, "per_chunk"))
    placed = slabs_placed(monkeypatch, plain)
    # A chunk is sent when a step ends, and only once the one before it has come.
    hold_up(monkeypatch, plain, "a", 54, lambda: placed)
    hold_up(monkeypatch, plain, "a", 300, lambda: len({p.slab.transfer for p in placed}) > 1)
    serve(plain, make_requests([(301, 2)]), tmp_path)
    ran = Ran.last(tmp_path)
    last = max(s.stages[-1][1] for s in ran.record.steps if s.instance == "a")
    assert len(ran.moved(0)) >= 3
    assert sum(t.start < last for t in ran.record.transfers) >= 2


@pytest.mark.parametrize(
    "segments", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4))]
)
def test_segments_leave_while_the_next_ones_are_computed(
    segments: int,
    loader: Loader,
    expected: dict[str, list[Done]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    instances = {name: {"group": name} | roomy(16) for name in "ab"}
    instances["a"]["segments"] = segments
    llm = loader.load("two", groups={"a": {}, "b": {}}, instances=instances)
    if segments > 1:
        placed = slabs_placed(monkeypatch, llm)
        hold_up(monkeypatch, llm, "a", len(REQUESTS[1].prompt), lambda: placed)
    set_system(llm, cronus("a", "b", 1.0, "per_segment"))
    assert serve(llm, REQUESTS[1:2], tmp_path) == expected["two"][1:2]
    ran = Ran.last(tmp_path)
    check_transfers(ran, token_bytes("two"))
    (step,) = [step for step in ran.record.steps if step.instance == "a"]
    (transfer,) = ran.record.transfers
    assert len(step.stages) == segments
    assert transfer.requested <= step.stages[0][0]
    # The first piece has left before the last one's computing is over, and hides behind it.
    assert transfer.start >= step.stages[0][1] - ROUNDING
    assert (transfer.start < step.stages[-1][1]) == (segments > 1)
    assert transfer.end > step.stages[-1][1]
    hidden = step.stages[-1][1] - transfer.start
    assert transfer.hidden_s == pytest.approx(max(hidden, 0), abs=ROUNDING)


def test_pages_reserved_ahead_are_taken_back_and_the_kv_is_sent_again(
    plain: LLM, alone: dict[str, LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first request's output needs them while the second one's prompt is still computed."""
    decodes: list[float] = []
    stage = plain.cluster.engines["a"].worker.stages[-1]
    end_of = stage.end_of
    monkeypatch.setattr(stage, "end_of", lambda *args: decodes.append(0) or end_of(*args))
    hold_up(monkeypatch, plain, "b", 400, lambda: len(decodes) > 60)
    requests = make_requests([(30, 100), (400, 10), (20, 60)])
    # Room for 6 pages of the first one, which takes 17 in the end, and 50 of the second one.
    set_pools(plain, {"a": 56}, caching=False)
    set_system(plain, Way("disaggregated_b_a", None, "per_chunk", "", "").options)
    assert serve(plain, requests, tmp_path) == serve(alone["two"], requests)
    ran = Ran.last(tmp_path)
    assert sum(ran.moved(1)) > 400
    check_transfers(ran, token_bytes("two"))
    assert ran.metrics["preemptions"] == 0


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("cut", [0, 1, 32, 1.0])
def test_options_of_requests_go_with_them(
    plain: LLM, alone: dict[str, LLM], cut: float, rule: str
) -> None:
    """Penalties count tokens from before the hand-off; several continuations; log probabilities."""
    options = [
        {"temperature": 0, "presence_penalty": 1.5, "repetition_penalty": 1.3, "logprobs": 3},
        {"temperature": 0, "prompt_logprobs": 2, "logprobs": 0},
        {"temperature": 0.8, "seed": 1, "n": 3, "frequency_penalty": 0.5},
        {"temperature": 0.9, "seed": 2, "top_k": 20, "min_p": 0.01, "logit_bias": {7: 3.0}},
    ]
    prompts = [list(r.prompt) for r in REQUESTS if len(r.prompt) in (33, 41, 65, 100)]
    params = [
        SamplingParams.model_validate(given | {"max_tokens": 16, "ignore_eos": True})
        for given in options
    ]
    set_system(plain, cronus("a", "b", cut, rule))
    found, wanted = (
        llm.generate([{"prompt_token_ids": p} for p in prompts], params, progress=False)
        for llm in (plain, alone["two"])
    )
    for ours, theirs in zip(found, wanted, strict=True):
        assert [c.token_ids for c in ours.outputs] == [c.token_ids for c in theirs.outputs]
        for one, other in zip(ours.outputs, theirs.outputs, strict=True):
            same_logprobs(one.logprobs, other.logprobs)
        same_logprobs(ours.prompt_logprobs, theirs.prompt_logprobs)
    assert [len(o.outputs) for o in found] == [1, 1, 3, 1]
    assert found[1].prompt_logprobs is not None
    assert len(found[1].prompt_logprobs) == len(prompts[1])


def same_logprobs(found: Any, wanted: Any) -> None:
    """Positions of token -> ``Logprob``, or None."""
    assert (found is None) == (wanted is None)
    for ours, theirs in zip(found or (), wanted or (), strict=True):
        assert (ours or {}).keys() == (theirs or {}).keys()
        for token, logprob in (ours or {}).items():
            assert logprob.logprob == pytest.approx(theirs[token].logprob, abs=1e-4)
            assert logprob.rank == theirs[token].rank


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("cut", [31, 1.0])
def test_stops(
    plain: LLM, expected: dict[str, list[Done]], cut: float, rule: str, tmp_path: Path
) -> None:
    """Stops are at the first token, which an instance with the whole prompt draws, or later."""
    requests, wanted = [], []
    for number, (request, done) in enumerate(zip(REQUESTS, expected["two"], strict=True)):
        stop = done.tokens[(0, 5)[number % 2] % len(done.tokens)]
        params = request.params.model_copy(update={"stop_token_ids": (stop,)})
        requests.append(Request(request.prompt, params))
        wanted.append(done.tokens[: done.tokens.index(stop) + 1])
    set_system(plain, cronus("a", "b", cut, rule))
    set_pools(plain, {}, caching=False)
    assert [done.tokens for done in serve(plain, requests, tmp_path)] == wanted
    # A second run finds nothing amiss in the pools that the first one left.
    for instance, shards in plain._runs.kv.items():
        assert not shards.reserved
        for number, shard in enumerate(shards.shards):
            assert shard.pool.num_free == shard.pool.num_usable - number, instance
    assert [done.tokens for done in serve(plain, requests, tmp_path)] == wanted


def test_the_first_token_counts_from_its_kvs_arrival(plain: LLM, tmp_path: Path) -> None:
    for counts in (True, False):
        plain.reset_prefix_cache()
        set_system(plain, Way("disaggregated_a_b", None, "on_demand", "", "").options)
        plain._runs.site = replace(plain._runs.site, counts_transfer=counts)
        serve(plain, run_dir=tmp_path)
        ran = Ran.last(tmp_path)
        arrived = {t.request: t.end for t in ran.record.transfers}
        for request, (_, output) in zip(ran.requests, LENGTHS, strict=True):
            if output > 1:
                assert (request.token_times[0] == arrived[request.id]) == counts
                assert (request.token_times[0] >= arrived[request.id]) == counts


def test_an_emulated_link_is_as_slow_as_it_says(
    loader: Loader, expected: dict[str, list[Done]], tmp_path: Path
) -> None:
    sections = PAIRS[0].sections
    link = {"between": ["b", "a"], "gb_s": 0.005, "latency_s": 0.004}
    llm = loader.load("two", **sections, links=[link], system=cronus("a", "b", 0.98))
    assert serve(llm, run_dir=tmp_path / "runs") == expected["two"]
    ran = Ran.last(tmp_path / "runs")
    assert ran.record.emulated
    check_transfers(ran, token_bytes("two"))
    for transfer in ran.record.transfers:
        # Two pairs of stages that share the link, with half of the layers each at least.
        seconds = transfer.end - transfer.start
        assert seconds >= 0.004 + transfer.num_bytes / 0.005e9 - ROUNDING


@pytest.mark.slow
def test_a_float32_instance_beside_a_bfloat16_one(
    loader: Loader, expected: dict[str, list[Done]], tmp_path: Path
) -> None:
    """KV goes as bfloat16; who draws the first token says which it is."""
    sections = PAIRS[0].sections
    for name, dtype in (("a", "float32"), ("b", "bfloat16")):
        sections["instances"][name]["dtype"] = dtype
    llm = loader.load("two", **sections, verify_transfers=True)
    for source, dest in (("a", "b"), ("b", "a")):
        for cut in (33, 1.0):
            set_system(llm, cronus(source, dest, cut))
            done = serve(llm, run_dir=tmp_path / "runs")
            assert [len(d.tokens) for d in done] == [output for _, output in LENGTHS]
            ran = Ran.last(tmp_path / "runs")
            check_transfers(ran, token_bytes("two", itemsize=2))
            check_hand_offs(ran, Way(f"cronus_{source}_{dest}", cut, "on_demand", "", "on"))
            first = [d.tokens[0] for d in done] == [d.tokens[0] for d in expected["two"]]
            assert first or (source, cut) != ("a", 1.0)


@pytest.mark.slow
def test_lists_of_sides_that_agree_on_nothing(
    loader: Loader, expected: dict[str, list[Done]], tmp_path: Path
) -> None:
    """Page sizes, the layout of keys, tensor parallelism and the pipeline, all at once."""
    groups = {"g": {"devices": 2}, "h": {}, "k": {"devices": 2, "tensor_parallel_size": 1}}
    stages = [{"group": "k", "layers": n} for n in (1, 3)]
    instances = {
        "p": {"group": "g", "kernels": "interpret"} | roomy(12),
        "q": {"group": "h"} | roomy(20),
        "d": {"stages": stages} | roomy(32),
    }
    llm = loader.load(
        "three",
        groups=groups,
        instances=instances,
        verify_transfers=True,
        system={"name": "disaggregated", "prefill": ["p", "q"], "decode": "d"},
    )
    assert serve(llm, run_dir=tmp_path / "runs") == expected["three"]
    ran = Ran.last(tmp_path / "runs")
    check_transfers(ran, token_bytes("three"))
    ways = {(t.source, t.dest) for t in ran.record.transfers}
    assert ways == {("p", "d"), ("q", "d")}
    assert ran.decoded("d") == sum(output - 1 for _, output in LENGTHS)


@pytest.mark.slow
def test_pools_prefix_caches_and_launching_ahead_as_configured(
    loader: Loader, expected: dict[str, list[Done]], tmp_path: Path
) -> None:
    """The run file sets the options that the cases above set from run to run."""
    sections = PAIRS[0].sections
    a, b = sections["instances"]["a"], sections["instances"]["b"]
    a |= {"num_pages": KINDS_A[0].pages(PEAK) + 1, "enable_prefix_caching": False, "segments": 1}
    b |= {"num_pages": KINDS_B[0].pages(PEAK) + 1}
    del b["stages"]
    b |= {"group": "b", "launch_ahead": False}
    llm = loader.load("two", **sections)
    for source, dest in (("a", "b"), ("b", "a")):
        for cut, rule in ((33, "at_end"), (1.0, "per_chunk")):
            set_system(llm, cronus(source, dest, cut, rule))
            for _ in range(2):
                assert serve(llm, run_dir=tmp_path / "runs") == expected["two"]
            ran = Ran.last(tmp_path / "runs")
            assert ran.metrics["preemptions"] > 0
            assert (ran.metrics["cached_tokens"] > 0) == (source == "b")
