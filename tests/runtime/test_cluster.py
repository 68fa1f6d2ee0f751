"""Every way of serving yields the tokens of one instance on one device, and moves what it should.

All in float32, where the likeliest token stands out by more than rounding can change.
"""

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from cluster_cases import (
    HEAD_DIM,
    HEADS,
    KINDS_A,
    KINDS_B,
    LAYERS,
    LENGTHS,
    PAIRS,
    PEAK,
    RULES,
    SIDES,
    WAYS,
    Case,
    Pair,
    Request,
    Way,
    covering_cases,
    cut_of,
    free_executables,
    load,
    make_model,
    make_requests,
    roomy,
    set_pools,
    set_system,
)

from jaxinfer import LLM, SamplingParams
from jaxinfer.report.records import RequestRecord, RunRecord, read_run

REQUESTS = make_requests()
PROMPT_TOKENS = sum(prompt for prompt, _ in LENGTHS)
DECODE_TOKENS = sum(output - 1 for _, output in LENGTHS)
# Of times in a run's files.
ROUNDING = 2e-6


@dataclass(frozen=True)
class Done:
    """One request's tokens, and the sum of their log probabilities."""

    tokens: list[int]
    logprob: float

    def __eq__(self, other: object) -> bool:
        """Log probabilities are compared as far as the order of additions leaves them."""
        assert isinstance(other, Done)
        return self.tokens == other.tokens and abs(self.logprob - other.logprob) < 1e-3


def serve(
    llm: LLM, requests: Sequence[Request] = REQUESTS, run_dir: Path | None = None
) -> list[Done]:
    prompts = [{"prompt_token_ids": list(request.prompt)} for request in requests]
    params = [request.params for request in requests]
    outputs = llm.generate(prompts, params, progress=False, run_dir=run_dir)
    completions = [output.outputs[0] for output in outputs]
    return [Done(c.token_ids, c.cumulative_logprob or 0.0) for c in completions]


@dataclass(frozen=True)
class Ran:
    """A run as its folder tells it."""

    record: RunRecord

    @classmethod
    def last(cls, folder: Path) -> "Ran":
        number = max(int(path.name) for path in folder.iterdir())
        return cls(read_run(folder / str(number)))

    @property
    def metrics(self) -> dict[str, Any]:
        return self.record.run["metrics"]

    @property
    def instances(self) -> set[str]:
        """Those that ran a step."""
        return {step.instance for step in self.record.steps}

    @property
    def requests(self) -> list[RequestRecord]:
        """In the order of the workload."""
        return sorted(self.record.requests, key=lambda request: int(request.id))

    def prefilled(self, instance: str) -> int:
        return sum(s.prefill_tokens for s in self.record.steps if s.instance == instance)

    def decoded(self, instance: str) -> int:
        return sum(s.decode_tokens for s in self.record.steps if s.instance == instance)

    def moved(self, number: int) -> list[int]:
        """Tokens of each transfer of a request, by its place in the workload."""
        name = self.requests[number].id
        return [t.num_tokens for t in self.record.transfers if t.request == name]


def check_run(ran: Ran, pair: Pair, way: Way) -> None:
    """Steps, cuts and transfers are those of the way, as far as it decides them."""
    assert ran.metrics["late_compiles"] == ran.metrics["failed"] == 0
    check_transfers(ran, token_bytes(pair.heads))
    check_cached(ran, pair, way)
    if way.system == "data_parallel":
        assert ran.instances == {"a", "b"}
        assert not ran.record.transfers
        assert [request.cut for request in ran.requests] == [0] * len(LENGTHS)
    else:
        check_hand_offs(ran, way)
    if way.small:
        # Only outputs outgrow what was reserved.
        outputs_here = way.system == "data_parallel" or way.small == way.ends[1]
        assert (ran.metrics["preemptions"] > 0) == outputs_here
        assert ran.metrics["preemptions"] == sum(r.preemptions for r in ran.requests)
    else:
        check_nothing_is_computed_twice(ran)


def check_nothing_is_computed_twice(ran: Ran) -> None:
    assert ran.metrics["preemptions"] == 0
    prefilled = sum(ran.prefilled(name) for name in ran.instances)
    assert prefilled == PROMPT_TOKENS - ran.metrics["cached_tokens"]
    assert sum(ran.decoded(name) for name in ran.instances) == DECODE_TOKENS


def token_bytes(heads: str, itemsize: int = 4) -> int:
    """Keys and values of one token."""
    return 2 * LAYERS * HEADS[heads][1] * HEAD_DIM * itemsize


def check_transfers(ran: Ran, bytes_per_token: int) -> None:
    for transfer in ran.record.transfers:
        assert transfer.num_tokens > 0
        assert transfer.num_bytes == transfer.num_tokens * bytes_per_token
        assert transfer.requested <= transfer.start + ROUNDING
        assert transfer.start < transfer.end
        assert 0 <= transfer.hidden_s <= transfer.end - transfer.start + ROUNDING


def check_cached(ran: Ran, pair: Pair, way: Way) -> None:
    """A request starts with the full pages of its first leg that are there, less its last token."""
    found = ran.metrics["cached_tokens"]
    if way.caching == "off":
        assert found == 0
    elif way.system != "data_parallel":
        first = way.ends[0] if cut_of(way.cut, 1) else way.ends[1]
        size = getattr(pair, first).page_size
        legs = [cut_of(way.cut, prompt) or prompt for prompt, _ in LENGTHS]
        most = sum((end - 1) // size * size for end in legs)
        if way.caching == "twice" and not way.small:
            assert found == most
        assert found <= most


def check_hand_offs(ran: Ran, way: Way) -> None:
    source, dest = way.ends
    cuts = [cut_of(way.cut, prompt) for prompt, _ in LENGTHS]
    ends_first = [
        cut == prompt and output == 1 for cut, (prompt, output) in zip(cuts, LENGTHS, strict=True)
    ]
    handed_on = [0 if ends else cut for cut, ends in zip(cuts, ends_first, strict=True)]
    assert [request.cut for request in ran.requests] == handed_on
    assert ran.instances == ({source, dest} if any(cuts) else {dest})
    assert all((t.source, t.dest) == (source, dest) for t in ran.record.transfers)
    assert ran.decoded(source) == 0
    if way.small:
        return  # Room may be taken back, and the KV sent again, or computed where it is needed.
    if any(cuts):
        assert ran.prefilled(source) == sum(cuts) - ran.metrics["cached_tokens"]
    for number, (cut, ends) in enumerate(zip(cuts, ends_first, strict=True)):
        moved = ran.moved(number)
        if way.rule != "per_chunk":
            assert moved == ([cut] if cut and not ends else [])
        elif ends or not cut:
            # Some pieces may be on their way by the first token, which is the last.
            assert sum(moved) < max(cut, 1)
        else:
            # Sent once more where no seat was free for the last piece.
            assert cut <= sum(moved) <= 2 * cut


@pytest.fixture(scope="module")
def models(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {heads: make_model(folder / heads, tiny_folder, heads) for heads in HEADS}


@pytest.fixture(scope="module")
def alone(models: dict[str, Path]) -> Iterator[dict[str, LLM]]:
    """One instance on one device that computes a prompt in one piece, and keeps none."""
    llms = {
        heads: LLM(
            str(model), progress=False, page_size=64, max_num_seqs=1,
            max_num_batched_tokens=128, enable_prefix_caching=False,
        )
        for heads, model in models.items()
    }  # fmt: skip
    yield llms
    llms.clear()
    free_executables()


@pytest.fixture(scope="module")
def expected(alone: dict[str, LLM]) -> dict[str, list[Done]]:
    return {heads: serve(llm) for heads, llm in alone.items()}


class Loader:
    """Loads one cluster at a time."""

    def __init__(self, models: Mapping[str, Path], folder: Path) -> None:
        self._models, self._folder = models, folder
        self._pair: Pair | None = None
        self._llm: LLM | None = None

    def pair(self, pair: Pair) -> LLM:
        """Anew only where it is not the one that was asked for last."""
        if pair != self._pair or not self._llm:
            self._llm = self.load(pair.heads, **pair.sections)
            self._pair = pair
        return self._llm

    def load(self, heads: str, **sections: Any) -> LLM:
        self.close()
        self._llm = load(self._models[heads], self._folder, **sections)
        return self._llm

    def close(self) -> None:
        self._llm = self._pair = None
        free_executables()


@pytest.fixture(scope="module")
def loader(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loader]:
    loader = Loader(models, tmp_path_factory.mktemp("clusters"))
    yield loader
    loader.close()


def test_tokens_stand_out(alone: dict[str, LLM]) -> None:
    """What makes equality a fair demand: greedy by a margin, draws by options near theirs."""
    greedy = [request for request in REQUESTS if request.params.temperature == 0]
    drawn = [request for request in REQUESTS if request.params.temperature > 0]
    for llm in alone.values():
        outputs = llm.generate(
            [{"prompt_token_ids": list(request.prompt)} for request in greedy],
            [request.params.model_copy(update={"logprobs": 2}) for request in greedy],
            progress=False,
        )
        for output in outputs:
            for position in output.outputs[0].logprobs or [{}]:
                first, second = sorted((p.logprob for p in position.values()), reverse=True)
                assert first - second > 1e-3
        reference = serve(llm, drawn)
        for factor in (1 - 1e-4, 1 + 1e-4):
            for option in ("temperature", "top_p"):
                near = [
                    Request(r.prompt, r.params.model_copy(update={option: value * factor}))
                    for r in drawn
                    for value in [getattr(r.params, option)]
                ]
                assert [d.tokens for d in serve(llm, near)] == [d.tokens for d in reference]
        assert len({token for done in reference for token in done.tokens}) > 40


def check_case(case: Case, llm: LLM, expected: list[Done], folder: Path) -> None:
    pair, way = case.pair, case.way
    set_system(llm, way.options)
    pools = {}
    if way.small:  # Of the pages that the longest request takes.
        pools[way.small] = getattr(pair, way.small).pages(PEAK)
    set_pools(llm, pools, way.caching != "off")
    for _ in range(1 + (way.caching == "twice")):
        assert serve(llm, run_dir=folder) == expected
    check_run(Ran.last(folder), pair, way)


@pytest.mark.parametrize("case", covering_cases(), ids=str)
def test_every_way_of_serving_gives_the_same_tokens(
    case: Case, loader: Loader, expected: dict[str, list[Done]], tmp_path: Path
) -> None:
    check_case(case, loader.pair(case.pair), expected[case.pair.heads], tmp_path)


def test_the_cases_cover_what_they_are_to_cover() -> None:
    cases = covering_cases()
    for what in ("devices", "page_size", "stages"):
        a, b = ({getattr(side, what) for side in kinds} for kinds in (KINDS_A, KINDS_B))
        both = {(getattr(c.pair.a, what), getattr(c.pair.b, what)) for c in cases}
        assert both == set(product(a, b))
    ways = {(c.way.system, c.way.cut, c.way.rule) for c in cases}
    assert ways == {(way.system, way.cut, way.rule) for way in WAYS}
    shortages = {(c.way.system, c.way.small, c.way.caching) for c in cases}
    assert {s[:2] for s in shortages} == {(way.system, way.small) for way in WAYS}
    cuts = {(cut_of(c.way.cut, prompt) - prompt) for c in cases for prompt, _ in LENGTHS}
    assert {0, -1} <= cuts


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_more_pairs_and_ways(
    seed: int,
    loader: Loader,
    expected: dict[str, list[Done]],
    tmp_path: Path,
) -> None:
    rng = random.Random(seed)
    pair = Pair(rng.choice(list(HEADS)), rng.choice(SIDES), rng.choice(SIDES))
    llm = loader.pair(pair)
    for number, way in enumerate(rng.sample(WAYS, 16)):
        check_case(Case(pair, way), llm, expected[pair.heads], tmp_path / str(number))


# One instance.

G, H = {"devices": 4, "tensor_parallel_size": 2}, {"devices": 2, "tensor_parallel_size": 1}


PLACES = {
    "tensor-parallel": ("three", {"g": {"devices": 2}}, {"group": "g"}),
    "three-stages": ("two", {"g": G | {"tensor_parallel_size": 1}}, [("g", 1), ("g", 1), ("g", 2)]),
    "two-groups": ("two", {"g": G, "h": H}, [("g", 3), ("h", 1)]),
    "there-and-back": ("three", {"g": G, "h": H}, [("g", 1), ("h", 2), ("g", 1)]),
}


@pytest.mark.parametrize("name", PLACES)
def test_one_instance_over_several_devices(
    name: str, loader: Loader, expected: dict[str, list[Done]], tmp_path: Path
) -> None:
    heads, groups, place = PLACES[name]
    if isinstance(place, list):
        place = {"stages": [{"group": group, "layers": layers} for group, layers in place]}
    stages = len(place.get("stages", ["one"]))
    system = "single" if name == "tensor-parallel" else "pipeline_parallel"
    instances = {"x": place | roomy(16)}
    llm = loader.load(heads, groups=groups, instances=instances, system=system)
    for caching, small in ((True, False), (False, True)):
        folder = tmp_path / f"{caching}-{small}"
        set_pools(llm, {"x": -(-PEAK // 16)} if small else {}, caching)
        for _ in range(2):
            assert serve(llm, run_dir=folder) == expected[heads]
        ran = Ran.last(folder)
        assert ran.metrics["late_compiles"] == 0
        assert {len(step.stages) for step in ran.record.steps} == {stages}
        if small:
            assert ran.metrics["preemptions"] > 0
        else:
            check_nothing_is_computed_twice(ran)
            pages = sum((prompt - 1) // 16 * 16 for prompt, _ in LENGTHS)
            assert ran.metrics["cached_tokens"] == caching * pages


# Two instances that are alike in other ways than those above.


def cronus(partial: str, chunked: str, cut: float, rule: str = "on_demand") -> dict[str, Any]:
    ends = {"partial": partial, "chunked": chunked}
    return {"name": "cronus", **ends, "cut": cut, "hand_off": rule}


def test_instances_whose_stages_lie_on_the_same_two_groups(
    loader: Loader, expected: dict[str, list[Done]], tmp_path: Path
) -> None:
    """Each stage with as many devices as its group gives it: layers go from one to two."""
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
    assert len(moved) == 1 or rule == "per_chunk"
    assert (ran.prefilled("a"), ran.prefilled("b")) == (cut, 300 - cut)
    assert (ran.decoded("a"), ran.decoded("b")) == (0, 19)
    assert [request.cut for request in ran.requests] == [cut]


def test_chunks_are_sent_while_the_next_ones_are_computed(plain: LLM, tmp_path: Path) -> None:
    set_system(plain, cronus("a", "b", 300, "per_chunk"))
    serve(plain, make_requests([(301, 2)]), tmp_path)
    ran = Ran.last(tmp_path)
    last = max(s.stages[-1][1] for s in ran.record.steps if s.instance == "a")
    assert len(ran.moved(0)) >= 3
    assert sum(t.start < last for t in ran.record.transfers) >= 2


def test_pages_reserved_ahead_are_taken_back_and_the_kv_is_sent_again(
    plain: LLM, alone: dict[str, LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first request's output needs them while the second one's prompt is still computed."""
    (stage, *_) = plain.cluster.engines["b"].worker.stages
    end_of = stage.end_of
    monkeypatch.setattr(stage, "end_of", lambda *args: time.sleep(0.02) or end_of(*args))
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
    """At the first token, which the first instance draws where it has the whole prompt; later."""
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
    for instance, shards in plain._kv.items():
        assert not shards.reserved
        for number, shard in enumerate(shards.shards):
            assert shard.pool.num_free == shard.pool.num_usable - number, instance
    assert [done.tokens for done in serve(plain, requests, tmp_path)] == wanted


def test_the_first_token_counts_from_its_kvs_arrival(plain: LLM, tmp_path: Path) -> None:
    for counts in (True, False):
        plain.reset_prefix_cache()
        plain.ttft_counts_transfer = counts
        set_system(plain, Way("disaggregated_a_b", None, "on_demand", "", "").options)
        serve(plain, run_dir=tmp_path)
        ran = Ran.last(tmp_path)
        arrived = {t.request: t.end for t in ran.record.transfers}
        for request, (_, output) in zip(ran.requests, LENGTHS, strict=True):
            if output > 1:
                assert (request.token_times[0] == arrived[request.id]) == counts
                assert (request.token_times[0] >= arrived[request.id]) == counts
    plain.ttft_counts_transfer = False


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
        # Two lanes, one after the other, with half of the layers each at least.
        seconds = transfer.end - transfer.start
        assert seconds >= 0.004 + transfer.num_bytes / 0.005e9 - ROUNDING


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


def test_pools_prefix_caches_and_launching_ahead_as_configured(
    loader: Loader, expected: dict[str, list[Done]], tmp_path: Path
) -> None:
    """What the cases above set from run to run, by the run file."""
    sections = PAIRS[0].sections
    a, b = sections["instances"]["a"], sections["instances"]["b"]
    a |= {"num_pages": KINDS_A[0].pages(PEAK) + 1, "enable_prefix_caching": False}
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
