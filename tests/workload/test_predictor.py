"""Predicted lengths: buckets of the true one with a given accuracy, and a user's own."""

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxinfer import JaxinferError
from jaxinfer.config.run_file import Workload, load_run_file
from jaxinfer.workload.predictor import (
    BucketPredictor,
    Buckets,
    OwnPredictor,
    modelled_predictor,
    real_predictor,
)

OWN = """
class MyPredictor:
    def __init__(self):
        self.asked = 0

    def __call__(self, request):
        self.asked += 1
        return self.asked, request.prompt_len + 100

class Needs:
    def __init__(self, more):
        pass

def breaks(request):
    return {}["not there"]

def leaves(request):
    raise SystemExit(3)

class LeavesAtOnce:
    def __init__(self):
        raise SystemExit

def nothing(request):
    return None

def as_list(request):
    return [0, 0]

number = 3
odd = {name: lambda request, answer=answer: answer for name, answer in {
    "text": "ab", "one": (1,), "three": (1, 2, 3), "floats": (1.0, 2.0), "falls": (3, 2),
    "negative": (-1, 2), "flags": (False, True)}.items()}
for name, function in odd.items():
    globals()["odd_" + name] = function
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_predictor_of_a_user.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    return "own_predictor_of_a_user"


def request(name: str = "r", prompt_len: int = 7) -> Any:
    return SimpleNamespace(id=name, prompt_len=prompt_len)


def buckets(lengths: list[int], **options: Any) -> list[tuple[int, int]]:
    """Return the ranges predicted of requests of these true lengths, one after the other."""
    true = {f"r{i}": length for i, length in enumerate(lengths)}
    predict = BucketPredictor(Buckets(**options), lambda r: true[r.id])
    return [predict(request(name)) for name in true]


@pytest.mark.parametrize(
    ("length", "bounds"),
    [(1, (0, 200)), (199, (0, 200)), (200, (200, 400)), (399, (200, 400)), (1000, (1000, 1200))],
)
def test_the_bucket_of_the_true_length(length: int, bounds: tuple[int, int]) -> None:
    assert buckets([length], granularity=200, accuracy=1) == [bounds]


def test_so_many_are_right_and_the_others_next_to_it() -> None:
    """Standard deviations of 4,000 draws: 0.0068 of 0.749, and 0.0079 of a half."""
    found = Counter(buckets([500] * 4000, granularity=200, accuracy=0.749, seed=3))
    assert set(found) == {(200, 400), (400, 600), (600, 800)}
    assert found[400, 600] / 4000 == pytest.approx(0.749, abs=0.03)
    assert found[200, 400] / found[600, 800] == pytest.approx(1, abs=0.25)


def test_below_the_first_bucket_is_none() -> None:
    assert set(buckets([5] * 50, granularity=10, accuracy=0)) == {(10, 20)}
    assert set(buckets([15] * 50, granularity=10, accuracy=0)) == {(0, 10), (20, 30)}


def test_the_seed_decides() -> None:
    def draw(seed: int) -> list[tuple[int, int]]:
        return buckets([50] * 60, granularity=10, accuracy=0.5, seed=seed)

    assert draw(1) == draw(1) != draw(2)


def test_a_users_own(own: str) -> None:
    for make in (real_predictor, lambda name: modelled_predictor(name, lambda r: 1 / 0)):
        predict = make(f"{own}:MyPredictor")
        assert predict
        assert [predict(request()), predict(request(prompt_len=9))] == [(1, 107), (2, 109)]
    assert OwnPredictor(f"{own}:nothing")(request()) is None
    assert OwnPredictor(f"{own}:as_list")(request()) == (0, 0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("breaks", "raises KeyError: 'not there'"),
        ("leaves", "raises SystemExit: 3 ("),
        ("odd_text", "returns 'ab' for request 'r', must be output tokens, (at least, at most)"),
        ("odd_one", "returns (1,) for"),
        ("odd_three", "returns (1, 2, 3) for"),
        ("odd_floats", "returns (1.0, 2.0) for"),
        ("odd_falls", "returns (3, 2) for"),
        ("odd_negative", "returns (-1, 2) for"),
        ("odd_flags", "returns (False, True) for"),
    ],
)
def test_what_a_users_own_does_amiss_is_one_line(own: str, name: str, message: str) -> None:
    with pytest.raises(JaxinferError) as caught:
        OwnPredictor(f"{own}:{name}")(request())
    assert str(caught.value).startswith(f"workload.predictor: {own}:{name} {message}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Needs", "making a Needs raises TypeError: "),
        ("LeavesAtOnce", "making a LeavesAtOnce raises SystemExit ("),
        ("number", "'own_predictor_of_a_user:number' is 3, must be a function or a class"),
        (
            "MyPredictr",
            "'own_predictor_of_a_user:MyPredictr': module 'own_predictor_of_a_user' has",
        ),
    ],
)
def test_what_is_no_predictor(own: str, name: str, message: str) -> None:
    with pytest.raises(JaxinferError) as caught:
        OwnPredictor(f"{own}:{name}")
    assert str(caught.value).startswith(f"workload.predictor: {message}")


def test_a_module_that_is_not_there() -> None:
    with pytest.raises(JaxinferError, match=r"^workload\.predictor: 'no_such:x': No module named"):
        OwnPredictor("no_such:x")


def test_none_is_none() -> None:
    assert real_predictor(None) is modelled_predictor(None, lambda r: 1) is None


def test_a_real_run_does_not_know_the_truth() -> None:
    with pytest.raises(JaxinferError, match=r"^workload\.predictor: buckets go by the true length"):
        real_predictor(Buckets(granularity=1, accuracy=1))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"granularity": 0, "accuracy": 1}, "workload.predictor.granularity is 0, must be greater"),
        ({"granularity": 9}, "workload.predictor.accuracy is missing"),
        ({"granularity": 9, "accuracy": 1.5}, "workload.predictor.accuracy is 1.5, must be less"),
        ({"granularity": 9, "acuracy": 1}, "predictor.acuracy: unknown option, did you mean 'accu"),
        ("MyPredictor", "workload.predictor: must be my_module:MyPredictor, or a mapping of"),
        (3, "workload.predictor: must be my_module:MyPredictor, or a mapping of granu"),
    ],
)
def test_options(given: Any, message: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps({"workload": {"predictor": given}}))
    with pytest.raises(JaxinferError) as caught:
        load_run_file(file)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_run_file_has_it() -> None:
    options = {"granularity": 200, "accuracy": 0.85}
    workload = Workload.model_validate({"predictor": options})
    assert workload.predictor == Buckets(granularity=200, accuracy=0.85, seed=0)
    again = workload.model_dump(mode="json", exclude_unset=True)
    assert (again, Workload.model_validate(again)) == ({"predictor": options}, workload)
    assert Workload(predictor="a:b").predictor == "a:b"
    assert Workload().predictor is None
