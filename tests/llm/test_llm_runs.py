"""Runs of the tiny model: what they count, leave behind and tell."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from llm_cases import GREEDY, PROMPTS, tokens
from tiny_model import TINY_OPTIONS

from jaxinfer import LLM, JaxinferError, SamplingParams
from jaxinfer.config.engine import EngineOptions
from jaxinfer.config.run_file import RunFile, Workload
from jaxinfer.report.origin import PACKAGES
from jaxinfer.runtime.cluster import Cluster
from jaxinfer.runtime.world import RealWorld
from jaxinfer.workload.predictor import Buckets


def test_a_run_leaves_its_files(tiny: LLM, tmp_path: Path) -> None:
    for _ in range(2):
        tiny.reset_prefix_cache()
        tiny.generate(PROMPTS, GREEDY, progress=False, run_dir=tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2"]
    run = json.loads((tmp_path / "2" / "run.json").read_text())
    assert run["status"] == "finished"
    assert run["instances"]["engine"]["engine"]["max_num_seqs"] == 4
    assert set(run["versions"]) == {"jaxinfer", *PACKAGES}
    steps = [json.loads(line) for line in (tmp_path / "2" / "steps.jsonl").open()]
    assert len(steps) == run["metrics"]["steps"]
    # The first token comes from prefill, the others from one decode each.
    prompt_tokens = sum(len(tiny.tokenizer.encode(p)) for p in PROMPTS)
    assert sum(s["prefill_tokens"] for s in steps) == prompt_tokens
    assert sum(s["decode_tokens"] for s in steps) == 4 * 19
    assert sum(s["sampled"] for s in steps) == 4 * 20
    assert max(s["pages_in_use"] for s in steps) == run["metrics"]["peak_pages"]
    for before, after in pairwise(steps):
        assert before["start"] <= before["end"] <= after["start"] <= after["end"]
    m = run["metrics"]
    assert m["late_compiles"] == 0
    assert m["prompt_tokens"] == prompt_tokens
    assert m["output_tokens"] == 80
    assert m["num_pages"] == TINY_OPTIONS["num_pages"] - 1  # One is padding's.


def test_a_run_tells_what_is_its_own(
    tiny: LLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Compilations and delays of the runs before it are not told, nor time twice."""
    late = [{"engine": [9.0]}, {"engine": [0.25, 0.5]}]
    monkeypatch.setattr(Cluster, "take_overruns", lambda cluster: late.pop(0))
    monkeypatch.setattr(tiny.engine.worker.stages[0].step, "late_compiles", 5)
    worlds: list[RealWorld] = []

    def make(*args: Any) -> RealWorld:
        worlds.append(RealWorld(*args))
        return worlds[-1]

    monkeypatch.setattr("jaxinfer.runtime.run.RealWorld", make)
    made = tiny.make_requests("a", [5, 6, 7], GREEDY)
    metrics = tiny.run(made, lambda output: None, progress=False, run_dir=tmp_path)
    run = json.loads((tmp_path / "1" / "run.json").read_text())
    assert run["overruns"] == {"engine": {"steps": 2, "seconds": 0.75}}
    assert metrics.late_compiles == 0
    assert 0 < metrics.launching_s == worlds[0].launching_s
    parts = metrics.loop_s + metrics.launching_s + worlds[0].waited_s
    assert 0 < metrics.loop_s < parts <= metrics.wall_s


def test_strict_shapes_refuses_a_step_that_was_not_compiled(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(str(tiny_folder), progress=False, strict_shapes=True, **TINY_OPTIONS)
    assert tokens(llm, "Hello", GREEDY)
    step = llm.engine.worker.stages[0].step
    assert step.late_compiles == 0
    step._executables.clear()
    monkeypatch.setattr(step, "compile_ahead", lambda *args: iter([0]))
    with pytest.raises(JaxinferError, match="strict_shapes"):
        tokens(llm, "Hello", GREEDY)
    step._strict = False
    assert tokens(llm, "Hello", GREEDY)
    assert step.late_compiles > 0


def test_requests_come_in_the_order_given(tiny: LLM) -> None:
    llm_ids = [[i] * 20 for i in range(6)]
    requests = [r for i, ids in enumerate(llm_ids) for r in tiny.make_requests(str(i), ids, GREEDY)]
    tiny.run(requests, lambda output: None, progress=False)
    starts = [request.metrics.first_scheduled or 0.0 for request in requests]
    assert starts == sorted(starts)
    assert starts[0] < starts[-1]


def test_prompts_that_begin_alike_are_served_one_after_the_other(tiny: LLM) -> None:
    prompts: list[Any] = [{"prompt_token_ids": [n % 3] * 16 + [n]} for n in range(9)]
    found = {}
    for order in ("given", "blend", "prefix_tree"):
        tiny.reset_prefix_cache()
        outputs = tiny.generate(prompts, GREEDY, progress=False, order=order)
        assert [output.prompt_index for output in outputs] == list(range(9))
        found[order] = [output.outputs[0].token_ids for output in outputs]
    assert found["given"] == found["blend"] == found["prefix_tree"]
    starts = [output.metrics.first_scheduled or 0.0 for output in outputs]
    by_start = sorted(range(9), key=lambda n: (starts[n], n % 3, n))
    assert by_start == [0, 3, 6, 1, 4, 7, 2, 5, 8]


def test_ids_that_look_like_those_of_continuations_do_not_clash(tiny: LLM) -> None:
    several = SamplingParams(n=2, max_tokens=3, ignore_eos=True)
    one = SamplingParams(max_tokens=3, ignore_eos=True)
    asked = {"a": several, "a (2 of 2)": one, "a (1 of 2)": one, "a (1 of 2) (1 of 1)": one}
    requests = [r for name, p in asked.items() for r in tiny.make_requests(name, [1, 2], p)]
    outputs = {}
    tiny.run(requests, lambda o: outputs.update({o.request_id: len(o.outputs)}), progress=False)
    assert outputs == {name: params.n for name, params in asked.items()}
    with pytest.raises(JaxinferError, match="two requests have the id 'a'"):
        tiny.run(tiny.make_requests("a", [1], one) * 2, lambda output: None, progress=False)


def test_a_failure_in_reporting_ends_the_run(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxinfer.runtime.worker._sample_logprobs", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tiny.generate("Hello", GREEDY, progress=False)
    monkeypatch.undo()
    assert len(tokens(tiny, "Hello", GREEDY)[0]) == 20


def test_a_prompt_seen_before_is_not_computed_again(tiny: LLM) -> None:
    """Pages of 8 tokens: 43 prompt tokens leave 40 that can be reused."""
    prompt = PROMPTS[1]
    assert len(tiny.tokenizer.encode(prompt)) == 43
    tiny.reset_prefix_cache()
    found = [tiny.generate(prompt, GREEDY, progress=False)[0] for _ in range(3)]
    assert [output.metrics.num_cached_tokens for output in found] == [0, 40, 40]
    assert len({tuple(output.outputs[0].token_ids) for output in found}) == 1
    tiny.reset_prefix_cache()
    assert tiny.generate(prompt, GREEDY, progress=False)[0].metrics.num_cached_tokens == 0
    # The other continuations wait for the first one's pages.
    params = SamplingParams(n=4, seed=1, max_tokens=5)
    tiny.reset_prefix_cache()
    requests = tiny.make_requests("r", tiny.tokenizer.encode(prompt), params)
    metrics = tiny.run(requests, lambda output: None, progress=False)
    assert [r.metrics.num_cached_tokens for r in requests] == [0, 40, 40, 40]
    assert (metrics.requests, metrics.prompt_tokens, metrics.cached_tokens) == (1, 172, 120)
    # For all of them, however many steps of 32 tokens the prompt takes: 18 pages of 150 tokens.
    requests = tiny.make_requests("long", list(range(150)), params)
    tiny.run(requests, lambda output: None, progress=False)
    assert [r.metrics.num_cached_tokens for r in requests] == [0, 144, 144, 144]


def test_a_users_predictor_is_asked_as_requests_come_in(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "predictor_of_prompts.py").write_text(
        "def predict(request):\n    return 1, 2 * request.prompt_len\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    workload = Workload(predictor="predictor_of_prompts:predict")
    config = RunFile(
        model=str(tiny_folder), engine=EngineOptions(**TINY_OPTIONS), workload=workload
    )
    llm = LLM.from_config(config, progress=False)
    made = llm.make_requests("a", [5, 6, 7], GREEDY)
    llm.run(made, lambda output: None, progress=False)
    assert [request.predicted for request in made] == [(1, 6)]


def test_each_run_has_a_predictor_of_its_own(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A predictor that counts begins anew, as it does in simulations."""
    (tmp_path / "predictor_that_counts.py").write_text(
        "class Counts:\n    asked = 0\n\n    def __call__(self, request):\n"
        "        self.asked += 1\n        return 0, self.asked\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    workload = Workload(predictor="predictor_that_counts:Counts")
    config = RunFile(
        model=str(tiny_folder), engine=EngineOptions(**TINY_OPTIONS), workload=workload
    )
    llm = LLM.from_config(config, progress=False)
    for _ in range(2):
        made = [each for name in "ab" for each in llm.make_requests(name, [5, 6], GREEDY)]
        llm.run(made, lambda output: None, progress=False)
        assert [request.predicted for request in made] == [(0, 1), (0, 2)]


@pytest.mark.parametrize(
    "option", [{"predictor": Buckets(granularity=9, accuracy=1)}, {"max_tokens": 5}]
)
def test_what_only_a_modelled_run_knows(tiny_folder: Path, option: dict[str, Any]) -> None:
    config = RunFile(model=str(tiny_folder), workload=Workload(**option))
    with pytest.raises(
        JaxinferError, match=r"^workload\.(predictor: b|max_tokens: w).* modelled run"
    ):
        LLM.from_config(config, progress=False)
