"""Outputs one by one, and runs that are left in the midst, on the tiny model."""

import gc
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from failure_cases import tokens
from stream_cases import by_break, greedy
from waiting import HANG_S, wait_until

from jaxinfer import LLM, JaxinferError, SamplingParams
from jaxinfer.config.engine import EngineOptions
from jaxinfer.runtime.cluster import Cluster
from jaxinfer.runtime.world import RealWorld


def test_how_many_are_read_ahead() -> None:
    engines = {
        name: SimpleNamespace(plan=SimpleNamespace(options=EngineOptions(max_num_seqs=seqs)))
        for name, seqs in (("a", 5), ("b", 32))
    }
    cluster = Cluster(None, engines, {}, {})  # type: ignore[arg-type]
    assert cluster.read_ahead == 2 * 37 + 16


def test_outputs_come_as_they_end_and_say_which_prompt_they_are_of(tiny: LLM) -> None:
    """Four requests run at once, so that they end in the order of their lengths."""
    prompts = ["one", "two", {"prompt_token_ids": [1, 2]}, "four"]
    params = [greedy(count) for count in (40, 10, 20, 30)]
    expected = tiny.generate(prompts, params, progress=False)
    assert [output.prompt_index for output in expected] == [0, 1, 2, 3]
    outputs = list(tiny.generate_iter(prompts, params, progress=False))
    assert [output.prompt_index for output in outputs] == [1, 2, 3, 0]
    assert [output.prompt for output in outputs] == ["two", None, "four", "one"]
    in_order = sorted(outputs, key=lambda output: output.prompt_index)
    assert tokens(in_order) == tokens(expected)
    # Ids count all prompts of all calls, in their order.
    ids = [int(output.request_id) for output in in_order]
    assert ids == list(range(ids[0], ids[0] + 4))
    assert ids[0] == int(expected[-1].request_id) + 1


def test_an_output_comes_while_others_are_under_way(tiny: LLM, worlds: list[RealWorld]) -> None:
    outputs = tiny.generate_iter(["long", "short"], [greedy(100), greedy(2)], progress=False)
    first = next(outputs)
    assert first.prompt_index == 1
    assert worlds[0]._steps
    (second,) = outputs
    assert len(second.outputs[0].token_ids) == 100
    assert second.metrics.token_times[10] > first.metrics.token_times[-1]


def test_conversations_one_by_one(tiny: LLM) -> None:
    talks = [[{"role": "user", "content": text}] for text in ("a", "b")]
    expected = tokens(tiny.chat(talks, greedy(5), progress=False))
    for given in (talks, iter(talks)):
        outputs = sorted(
            tiny.chat_iter(given, greedy(5), progress=False), key=lambda o: o.prompt_index
        )
        assert tokens(outputs) == expected
    assert tokens(list(tiny.chat_iter(talks[0], greedy(5), progress=False))) == expected[:1]


def by_error(llm: LLM, prompts: list[str], params: list[SamplingParams]) -> None:
    def consume() -> None:
        for _ in llm.generate_iter(prompts, params, progress=False):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        consume()
    assert caught.value.__traceback__  # Which knows the frame of the loop.


def by_close(llm: LLM, prompts: list[str], params: list[SamplingParams]) -> None:
    outputs = llm.generate_iter(prompts, params, progress=False)
    next(outputs)
    outputs.close()


def by_close_elsewhere(llm: LLM, prompts: list[str], params: list[SamplingParams]) -> None:
    outputs = llm.generate_iter(prompts, params, progress=False)
    next(outputs)
    thread = threading.Thread(target=outputs.close)
    thread.start()
    thread.join(HANG_S)


def by_throw(llm: LLM, prompts: list[str], params: list[SamplingParams]) -> None:
    outputs = llm.generate_iter(prompts, params, progress=False)
    next(outputs)
    with pytest.raises(ZeroDivisionError):
        outputs.throw(ZeroDivisionError())


@pytest.mark.parametrize("leave", [by_break, by_error, by_close, by_close_elsewhere, by_throw])
def test_a_run_that_is_left_leaves_nothing_behind(
    tiny: LLM,
    worlds: list[RealWorld],
    live: set[int],
    leave: Callable[[LLM, list[str], list[SamplingParams]], None],
) -> None:
    prompts, params = [f"prompt {i}" for i in range(8)], [greedy(4)] + [greedy(60)] * 7
    expected = tokens(tiny.generate(prompts, params, progress=False))
    leave(tiny, prompts, params)
    assert worlds[-1].is_idle
    # Each launched step has been waited for.
    assert worlds[-1]._posted.empty()
    worlds.clear()
    wait_until(lambda: gc.collect() >= 0 and not live)
    # Of 64 pages, this needs all: 8 requests of 8 + 60 tokens are 9 pages each.
    assert tokens(tiny.generate(prompts, params, progress=False)) == expected


def test_the_run_after_one_that_was_left_has_a_pool_of_its_own(tiny: LLM) -> None:
    """Pages of the other's are still in use."""
    tiny.generate("a", greedy(1), progress=False)
    (before,) = tiny._runs.kv.values()
    by_break(tiny, ["a", "b"], [greedy(2), greedy(30)])
    assert not tiny._runs.kv
    tiny.generate("a", greedy(1), progress=False)
    (after,) = tiny._runs.kv.values()
    assert after is not before


def test_a_run_that_has_ended_is_forgotten(
    tiny: LLM, worlds: list[RealWorld], live: set[int]
) -> None:
    """The KV stays for the next one, and with it nothing of the loop that had it."""
    tiny.generate(["a", "b"], greedy(3), progress=False)
    world = weakref.ref(worlds.pop())
    gc.collect()
    assert world() is None
    assert not live


def test_what_is_asked_for_in_the_middle_is_refused(tiny: LLM) -> None:
    outputs = tiny.generate_iter(["a", "b"], [greedy(2), greedy(30)], progress=False)
    # Nothing runs until the first output is asked for.
    assert len(tiny.generate("c", greedy(2), progress=False)) == 1
    next(outputs)
    for ask in (lambda: tiny.generate("c", progress=False), tiny.reset_prefix_cache):
        with pytest.raises(JaxinferError, match=r"in the middle of a run: wait .* close its iter"):
            ask()
    with pytest.raises(JaxinferError, match="in the middle of a run"):
        next(tiny.generate_iter("c", progress=False))
    assert [output.prompt_index for output in outputs] == [1]
    tiny.reset_prefix_cache()


def test_who_goes_on_with_an_iterator_has_the_turn(tiny: LLM) -> None:
    """The thread that began it may wait for it; the one that goes on would wait for itself."""
    outputs = tiny.generate_iter(["a", "b", "c"], [greedy(2), greedy(9), greedy(40)])
    next(outputs)
    said: list[str] = []

    def go_on() -> None:
        next(outputs)
        try:
            tiny.generate("d", progress=False)
        except JaxinferError as error:
            said.append(str(error))
        waits.wait(HANG_S)
        said.append("left" if waiting.is_alive() else "has not waited")
        outputs.close()

    waits = threading.Event()
    going_on = threading.Thread(target=go_on)
    waiting = threading.Thread(target=lambda: tiny.generate("e", greedy(2), progress=False))
    going_on.start()
    waiting.start()
    waiting.join(0.2)
    waits.set()
    for thread in (going_on, waiting):
        thread.join(HANG_S)
        assert not thread.is_alive()
    assert [text.split(":")[0] for text in said] == ["this LLM is in the middle of a run", "left"]
