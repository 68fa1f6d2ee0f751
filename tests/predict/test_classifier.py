"""Training on what can be learned and on what cannot; buckets; the file of a classifier."""

import json
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxinfer import JaxinferError
from jaxinfer.config.run_file import Workload, load_run_file
from jaxinfer.lab.predict.classifier import Classifier, Training, classify
from jaxinfer.lab.predict.features import LengthBuckets, bag_of_tokens
from jaxinfer.lab.predict.length_classifier import About, load, save, train_on_prompts
from jaxinfer.workload.predictor import modelled_predictor, real_predictor
from scripts.reproduce.predictor.evaluate import (
    held_out,
    most_frequent,
    paired_bootstrap,
    table_by_length,
    wilson,
)

NAME = "jaxinfer.lab.predict.length_classifier:LengthClassifier"
ABOUT = About(model="tiny", vocab_size=100, granularity=32, cap=64, rows=1024, num_hidden=8)
TRAINING = Training(epochs=12, learning_rate=1e-2)


def planted(count: int, seed: int) -> tuple[list[list[int]], list[int]]:
    """Prompts of 8 tokens; where token 7 is among them, the answer is long."""
    rng = np.random.default_rng(seed)
    prompts, lengths = [], []
    for _ in range(count):
        tokens = rng.integers(10, 100, 8).tolist()
        is_long = bool(rng.random() < 0.5)
        if is_long:
            tokens[int(rng.integers(8))] = 7
        prompts.append(tokens)
        lengths.append(int(rng.integers(32, 64) if is_long else rng.integers(1, 32)))
    return prompts, lengths


def accuracy(model: Classifier, prompts: list[list[int]], lengths: list[int]) -> float:
    x_NF = np.stack([bag_of_tokens(prompt, ABOUT.rows) for prompt in prompts])
    wanted = [ABOUT.buckets.of(length) for length in lengths]
    return float(np.mean(classify(model, x_NF) == wanted))


def test_a_planted_rule_is_learned() -> None:
    model = train_on_prompts(*planted(1500, 0), ABOUT, TRAINING)
    assert accuracy(model, *planted(300, 1)) > 0.95


def test_lengths_that_do_not_follow_from_prompts_are_not() -> None:
    """A coin's accuracy: a half, with a standard deviation of 0.029 on 300 others."""
    prompts, lengths = planted(500, 0)
    np.random.default_rng(2).shuffle(lengths)
    model = train_on_prompts(prompts, lengths, ABOUT, TRAINING)
    assert accuracy(model, *planted(300, 1)) == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize(
    ("length", "bounds"),
    [(0, (0, 200)), (199, (0, 200)), (200, (200, 400)), (400, (400, 500)), (499, (400, 500)),
     (500, (500, 500)), (900, (500, 500))],
)  # fmt: skip
def test_bounds_of_a_length(length: int, bounds: tuple[int, int]) -> None:
    buckets = LengthBuckets(200, 500)
    assert buckets.count == 4
    assert buckets.bounds(buckets.of(length)) == bounds


def test_a_bag_knows_neighbours_and_length() -> None:
    there, back = bag_of_tokens([1, 2, 3], 4096), bag_of_tokens([3, 2, 1], 4096)
    assert np.linalg.norm(there[:-1]) == pytest.approx(1)
    # Three tokens alike, two pairs apart: 3 / 5.
    assert there[:-1] @ back[:-1] == pytest.approx(0.6)
    assert there[-1] == back[-1] == pytest.approx(math.log(4) / 10)
    assert np.count_nonzero(bag_of_tokens([5], 64)) == 2


def test_each_example_is_predicted_by_the_others() -> None:
    def predict(known: np.ndarray, asked: np.ndarray) -> np.ndarray:
        assert not set(known.tolist()) & set(asked.tolist())
        assert len(known) + len(asked) == 23
        return asked

    assert held_out(predict, 23, 5, 0).tolist() == list(range(23))


def test_the_table_has_each_quantiles_majority() -> None:
    length_N = np.arange(100)
    class_N = np.where(length_N < 50, 3, length_N % 3 == 0)
    found = table_by_length(length_N, class_N, np.asarray([-5, 0, 49, 50, 99, 1000]), 4)
    assert found.tolist() == [3, 3, 3, 0, 0, 0]
    assert most_frequent([2, 1, 2, 1, 0]) == 1


def test_intervals() -> None:
    """Newcombe (1998), table I: Wilson's of 81 of 263, and of 0 of 20."""
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(0, 20) == pytest.approx((0, 0.1611), abs=5e-5)
    right, wrong = np.ones(400, bool), np.zeros(400, bool)
    assert paired_bootstrap(right, wrong, 0) == (1, 1)
    # A share of 0.5 of 400: 0.5 -+ 1.96 * 0.025.
    half = np.arange(400) % 2 == 0
    assert paired_bootstrap(half, wrong, 0) == pytest.approx((0.451, 0.549), abs=0.006)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("classifier") / "lengths.safetensors"
    save(train_on_prompts(*planted(200, 0), ABOUT, TRAINING), ABOUT, path)
    return path


def request(tokens: list[int]) -> Any:
    return SimpleNamespace(id="r", prompt_len=len(tokens), prompt_token_ids=tokens)


def test_a_run_file_names_it_and_its_file(file: Path, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        json.dumps({"workload": {"predictor": {"name": NAME, "path": str(file)}}})
    )
    workload = load_run_file(tmp_path / "run.yaml").workload
    again = Workload.model_validate(workload.model_dump(mode="json", exclude_unset=True))
    assert again == workload
    predict = real_predictor(workload.predictor)
    assert predict
    model, about = load(file)
    prompts, _ = planted(50, 3)
    x_NF = np.stack([bag_of_tokens(prompt, about.rows) for prompt in prompts])
    bounds = [about.buckets.bounds(int(each)) for each in classify(model, x_NF)]
    assert [predict(request(prompt)) for prompt in prompts] == bounds
    assert len(set(bounds)) == 2


def refusal(predictor: Any, tokens: list[int] | None = None) -> str:
    """Return the error of making the predictor or, with ``tokens``, of asking it."""
    given = Workload(predictor=predictor).predictor
    asked = request(tokens or [])
    make = partial(modelled_predictor, given, lambda r: 1)
    predict: Any = make if tokens is None else partial(make() or pytest.fail, asked)
    with pytest.raises(JaxinferError) as caught:
        predict()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_requests_it_cannot_predict(file: Path) -> None:
    own = {"name": NAME, "path": str(file)}
    assert refusal(own, []).startswith(
        "workload.predictor: request 'r' has a length but no tokens, which the classifier goes by"
    )
    assert refusal(own, [3, 100]) == (
        "workload.predictor: request 'r' has token 100: the classifier is of tiny, which has 100"
    )


def test_files_that_are_none(file: Path, tmp_path: Path) -> None:
    def said(path: Path) -> str:
        return refusal({"name": NAME, "path": str(path)})

    start = "workload.predictor.path: "
    missing = tmp_path / "missing"
    assert said(missing).startswith(f"{start}{missing}: ")
    text = tmp_path / "text"
    text.write_text("no tensors")
    assert said(text).startswith(f"{start}{text}: no safetensors file: ")
    model, about = load(file)
    other = tmp_path / "other.safetensors"
    save(model, about.model_copy(update={"rows": 2000}), other)
    assert said(other).endswith("damaged: its tensors do not fit what it says of itself")


def test_a_models_own_file_is_none(tiny_folder: Path) -> None:
    path = tiny_folder / "model.safetensors"
    assert refusal({"name": NAME, "path": str(path)}) == (
        f"workload.predictor.path: {path}: no length classifier, as `scripts.reproduce predictor` "
        "writes"
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": NAME}, "workload.predictor.path is missing"),
        ({"name": NAME, "pth": "x"}, "workload.predictor.pth: unknown option, did you mean 'path'"),
        ({"name": "json:dumps", "path": "x"}, "workload.predictor.path: json:dumps has no options"),
        ({"name": "none"}, "predictor: name is 'none', must be my_module:MyPredictor"),
    ],
)
def test_options_of_ones_own(given: dict[str, str], message: str) -> None:
    with pytest.raises(JaxinferError) as caught:
        real_predictor(Workload.model_validate({"predictor": given}).predictor)
    assert message in str(caught.value)
