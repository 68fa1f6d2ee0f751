"""Requests that come in: who waits for whom, how many are read, what is compiled and forgotten.

No model is loaded.
"""

from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from jaxinfer import JaxinferError, SamplingParams
from jaxinfer.request import Sampling
from jaxinfer.runtime.parallel_sampling import Continuations
from jaxinfer.runtime.request_feed import RequestFeed
from jaxinfer.runtime.requests import AskedPrompts
from jaxinfer.serving.request_state import RequestState
from jaxinfer.text.tokenizer import NoTokenizer


def group(name: str, n: int = 1, prompt_len: int = 4) -> list[RequestState]:
    """Return the continuations of a request as ``LLM.make_requests`` makes them."""
    params = SamplingParams(n=n)
    return [
        RequestState(
            f"{name} ({i + 1} of {n})" if n > 1 else name,
            prompt_len,
            3,
            payload=Sampling(params, 0, (), name, i),
        )
        for i in range(n)
    ]


def ids(requests: Sequence[RequestState]) -> list[str]:
    return [request.id for request in requests]


@pytest.mark.parametrize(
    ("page_size", "prompt_len", "waits"),
    [(8, 7, False), (8, 8, False), (8, 9, True), (8, 40, True), (None, 40, False)],
)
def test_who_waits_for_the_first(page_size: int | None, prompt_len: int, waits: bool) -> None:
    """A prompt's last token is computed anyway: a page of it is shared where one more follows."""
    first, *others = group("a", 3, prompt_len)
    alone = group("b", 1, prompt_len)
    found = Continuations([first, *others, *alone], page_size, 100)
    assert found.read(False) == [first, *others, *alone]
    assert found.held_back == ({"a": others} if waits else {})
    assert [r.goes_first for r in (first, *others, *alone)] == [False, waits, waits, False]
    assert found.released_by(first) == (others if waits else [])
    assert found.released_by(first) == []


def stream(*sizes: int) -> Iterator[RequestState]:
    for number, n in enumerate(sizes):
        yield from group(f"r{number}", n)


def test_what_has_a_length_is_read_at_once() -> None:
    found = Continuations(list(stream(*[1] * 9)), None, 2)
    assert (len(found.read(False)), found.num_parents) == (9, 9)
    assert not found.more_to_come


def test_a_stream_is_read_while_fewer_are_unfinished() -> None:
    """Continuations count one by one; a group is read whole; at least one, if asked for."""
    found = Continuations(stream(1, 2, 3, 1, 1), None, 3)
    one, *two = found.read(False)
    assert (ids([one, *two]), found.num_parents) == (["r0", "r1 (1 of 2)", "r1 (2 of 2)"], 2)
    assert found.read(False) == []
    one.finish_reason = "length"
    assert found.done_with(one) == [one]
    three = found.read(False)
    assert (len(three), found.num_parents) == (3, 3)
    # 5 are unfinished; without one that has ended there is no room but for what must come.
    assert found.read(False) == []
    assert ids(found.read(True)) == ["r3"]
    assert ids(found.read(True)) == ["r4"]
    assert found.more_to_come
    assert found.read(True) == []
    assert not found.more_to_come


def test_a_group_is_done_with_its_last_and_then_forgotten() -> None:
    a, b, c = group("a", 3)
    found = Continuations([a, b, c], None, 9)
    found.read(False)
    for request in (c, a):
        request.finish_reason = "stop"
        assert found.done_with(request) is None
    b.finish_reason = "stop"
    assert found.done_with(b) == [a, b, c]
    assert not found._unfinished


@pytest.mark.parametrize("attribute", ["epoch", "legs", "computed"])
def test_any_trace_of_a_run_is_told(attribute: str) -> None:
    (request,) = group("a")
    setattr(request, attribute, (1,) if attribute == "legs" else 1)
    with pytest.raises(JaxinferError, match=r"^request 'a' is used up: make_requests makes new"):
        Continuations([request], None, 9).read(False)


def test_a_group_is_there_before_the_next_request_is() -> None:
    """A stream that waits, as for a user's next prompt, holds back none that is complete."""

    def waits() -> Iterator[RequestState]:
        yield from group("a", 2)
        raise AssertionError("asked for one more")

    assert ids(Continuations(waits(), None, 1).read(False)) == ["a (1 of 2)", "a (2 of 2)"]


def test_samplers_grow_with_what_comes_in_and_each_is_told_of() -> None:
    """17 biases take room for 32, 3 log probabilities for 8; what is there serves less as well."""
    greedy = {"temperature": 0}
    bias = {"logit_bias": dict.fromkeys(range(17), 1.0)}
    options: tuple[dict[str, Any], ...] = (
        greedy,
        greedy | {"top_p": 0.5},
        bias,
        {"logprobs": 3, "top_k": 4, "min_p": 0.5},
        {},
        greedy,
    )
    compiled: list[tuple[str, Sequence[int]]] = []
    waits: list[bool] = []

    def engine(name: str) -> Any:
        def prepare(shape: Sequence[int], wait: bool) -> Iterator[int]:
            compiled.append((name, tuple(shape)))
            waits.append(wait)
            # All that there is to do, then what is left; one has all that it needs.
            yield from (2, 1, 0) if name == "a" else (0,)

        return SimpleNamespace(worker=SimpleNamespace(prepare=prepare))

    cluster: Any = SimpleNamespace(
        cached_page_size=None, read_ahead=1, engines={name: engine(name) for name in "ab"}
    )
    requests = [
        RequestState(str(i), 4, 3, payload=Sampling(SamplingParams(**given), 0, (), str(i)))
        for i, given in enumerate(options)
    ]
    feed = RequestFeed(iter(requests), cluster, NoTokenizer("bare", ()))
    told: list[tuple[str, int]] = []
    found = []
    for request in requests:
        assert feed.read(lambda *left: told.append(left), at_least_one=True) == [request]
        found.append(len(compiled))
    shapes = [
        (0, 0, 0, 0, True, False, False, False),
        (32, 0, 0, 0, True, True, False, False),
        (32, 0, 8, 0, True, True, True, False),
    ]
    assert compiled == [(name, shape) for shape in shapes for name in "ab"]
    assert found == [2, 2, 4, 6, 6, 6]
    assert waits == [True] * 2 + [False] * 4  # A run that has begun is not held up.
    assert told == [("compiling samplers", left) for _ in shapes for left in (2, 1, 0)]
    assert feed.read(lambda *left: None) == []


def test_a_prompt_is_forgotten_when_it_is_answered() -> None:
    def make(name: str, tokens: Sequence[int], params: SamplingParams) -> list[RequestState]:
        return group(name, params.n, len(tokens))

    def ask(prompts: Iterable[str]) -> AskedPrompts:
        return AskedPrompts(
            iter("ab"), make, prompts, lambda text: (text, [7, 7]), SamplingParams(n=2)
        )

    assert ask(iter("xy")).num_known == 0
    asked = ask(["x", "y"])
    assert asked.num_known == 2
    assert ids(list(asked.requests())) == ["a (1 of 2)", "a (2 of 2)", "b (1 of 2)", "b (2 of 2)"]
    for name, index, prompt in (("b", 1, "y"), ("a", 0, "x")):
        output: Any = SimpleNamespace(request_id=name)
        assert asked.answered(output) is output
        assert (output.prompt_index, output.prompt) == (index, prompt)
        assert name not in asked._unanswered
