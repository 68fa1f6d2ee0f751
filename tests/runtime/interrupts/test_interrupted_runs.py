"""Runs that are interrupted, as by Ctrl-C in a notebook, at any moment: the next one is right."""

import random
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from interrupts import Interrupt, interrupted_at, points

from jaxinfer import LLM, JaxinferError, SamplingParams
from jaxinfer.config.run_file import as_run_file
from jaxinfer.request import RequestOutput
from jaxinfer.runtime.stage.stage import Stage

ENGINE: dict[str, Any] = {
    "max_num_seqs": 3,
    "max_num_batched_tokens": 16,
    "token_buckets": [16],
    "page_size": 8,
    "num_pages": 40,
    "kernels": "plain",
}
ASK = [{"prompt_token_ids": [(7 * i + j * j) % 250 for j in range(5 + 12 * i)]} for i in range(3)]
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0)
# A prefill instance of two stages beside one of one, and KV heads that lie on three devices.
STAGES = [{"group": "a", "layers": 1}, {"group": "b", "layers": 1}]
HAND_OFFS: dict[str, Any] = {
    "groups": {name: {} for name in "abd"},
    "instances": {"p": {"stages": STAGES}, "d": {"group": "d"}},
    "system": {
        "name": "disaggregated", "prefill": "p", "decode": "d", "hand_off": "per_chunk",
    },
}  # fmt: skip
LENT = [{"group": name, "num_pages": 40} for name in "vw"]
SPREAD: dict[str, Any] = {
    "groups": {name: {} for name in "svw"},
    "instances": {"x": {"num_pages": 9, "stages": [{"group": "s", "attention": LENT}]}},
    "system": "hetis",
}
# What the loop's thread runs of a run, but the decisions: those are made anew each time.
MODULES = ("runtime/",)


def load(folder: Path, config: dict[str, Any]) -> LLM:
    engine = ENGINE | {"enable_prefix_caching": config["system"] != "hetis"}
    whole = {"model": str(folder), "engine": engine} | config
    return LLM.from_config(as_run_file(whole), progress=False)


def told(outputs: list[RequestOutput]) -> tuple[list[list[int]], list[float]]:
    """Tokens, and how likely they are."""
    found = [output.outputs[0] for output in outputs]
    return [each.token_ids for each in found], [each.cumulative_logprob or 0.0 for each in found]


def ask(llm: LLM) -> tuple[list[list[int]], list[float]]:
    return told(llm.generate(ASK, PARAMS, progress=False))


@pytest.fixture(scope="module")
def expected(tiny_folder: Path) -> tuple[list[list[int]], list[float]]:
    """By one instance that serves them one after the other."""
    llm = LLM(str(tiny_folder), progress=False, max_num_seqs=1, page_size=64, kernels="plain")
    return ask(llm)


@pytest.fixture(
    scope="module",
    params=["hand-offs", pytest.param("spread", marks=[pytest.mark.slow, pytest.mark.long])],
)
def llm(request: pytest.FixtureRequest, tiny_folder: Path) -> LLM:
    llm = load(tiny_folder, {"hand-offs": HAND_OFFS, "spread": SPREAD}[request.param])
    ask(llm)  # The first one opens more.
    return llm


def check(llm: LLM, expected: tuple[list[list[int]], list[float]]) -> None:
    tokens, logprobs = ask(llm)
    assert tokens == expected[0]
    assert logprobs == pytest.approx(expected[1], abs=1e-3)


@pytest.mark.parametrize(
    "most", [25, pytest.param(600, marks=[pytest.mark.slow, pytest.mark.long])]
)
def test_a_run_is_right_wherever_the_one_before_was_interrupted(
    llm: LLM, expected: tuple[list[list[int]], list[float]], most: int
) -> None:
    """As somebody presses Ctrl-C once, or twice.

    Between any two instructions, first where what a program returns takes the place of what was
    donated to it.
    """
    ask(llm)
    found = points(lambda: ask(llm), *MODULES)
    donating = {"forward", "place", "attend_here", "_copy"}
    first = [point for point in found if point[0].co_name in donating]
    others = [point for point in found if point[0].co_name not in donating]
    rng = random.Random(most)
    rng.shuffle(others)
    chosen = [*first, *others][:most]
    assert len(first) >= 3
    kept = []
    for point in chosen:
        for strike in (point, rng.choice(found))[: rng.randrange(1, 3)]:
            try:
                with interrupted_at(strike, *MODULES):
                    ask(llm)
            except Interrupt as interrupt:
                kept.append(interrupt)  # As notebooks do.
        check(llm, expected)
    assert len(kept) > most / 2


def test_pages_that_were_donated_or_never_came_are_made_again(
    llm: LLM, expected: tuple[list[list[int]], list[float]]
) -> None:
    stage = llm.engine.worker.stages[0]
    assert isinstance(stage, Stage)
    before = stage.kv
    stage.recover()
    assert stage.kv is before
    jax.tree.leaves(stage.kv)[-1].delete()
    stage.recover()
    leaves = jax.tree.leaves(stage.kv)
    assert [leaf.shape for leaf in leaves] == [leaf.shape for leaf in jax.tree.leaves(before)]
    assert not any(np.asarray(leaf).any() for leaf in leaves)
    stage.kv = None  # Interrupted, for want of memory.
    stage.recover()
    llm.reset_prefix_cache()  # The session does, wherever it has stages recover.
    check(llm, expected)


def test_an_instance_that_does_not_recover_is_lost_by_its_name(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = list(llm.cluster.engines)[-1]
    worker = llm.cluster.engines[name].worker

    def fails(patience: float | None) -> None:
        raise JaxinferError("its steps have not ended within 3 s")

    with monkeypatch.context() as patch:
        patch.setattr(worker, "launch", interrupt)
        with pytest.raises(Interrupt):
            ask(llm)
        patch.setattr(worker, "recover", fails)
        for _ in range(2):
            message = f"^instance {name} was lost, load the model again: its steps have not ended"
            with pytest.raises(JaxinferError, match=message):
                ask(llm)
        llm._runs._lost.clear()


def test_an_instance_recovers_after_an_interrupt_that_became_an_error(
    llm: LLM, expected: tuple[list[list[int]], list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt in C++ does, as the run after another interrupt begins."""
    worker = list(llm.cluster.engines.values())[-1].worker
    stage = worker.stages[-1]

    def fails() -> None:
        raise SystemError("<function zeros> returned a result with an exception set")

    with monkeypatch.context() as patch:
        patch.setattr(worker, "launch", interrupt)
        with pytest.raises(Interrupt):
            ask(llm)
    with monkeypatch.context() as patch:
        patch.setattr(stage, "recover", fails)
        with pytest.raises(SystemError, match=r"with an exception set$"):
            ask(llm)
    check(llm, expected)


def interrupt(*args: Any) -> None:
    raise Interrupt


def test_a_step_that_cannot_be_launched_says_why_and_not_what_follows(
    tiny_folder: Path, expected: tuple[list[list[int]], list[float]]
) -> None:
    """The next step is launched in the same round, and lacks what the first was to leave."""
    llm = LLM(str(tiny_folder), progress=False, **ENGINE)
    stage: Any = llm.engine.worker.stages[0]
    forward, calls = stage.forward, iter(range(100))

    def refuses(*args: Any) -> Any:
        if next(calls) == 1:
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return forward(*args)

    stage.forward = refuses
    with pytest.raises(RuntimeError, match=r"^RESOURCE_EXHAUSTED: Out of memory$"):
        ask(llm)
    check(llm, expected)
