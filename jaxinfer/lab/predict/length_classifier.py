"""A trained classifier that predicts lengths during a run."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxinfer.errors import JaxinferError
from jaxinfer.lab.predict.classifier import Classifier, Training, likeliest, train
from jaxinfer.lab.predict.features import LengthBuckets, bag_of_tokens
from jaxinfer.options.validation import OptionError, Options
from jaxinfer.workload.predictor import PromptView

_KIND = "jaxinfer length classifier"


class About(Options):
    """The description of a classifier in its file.

    Attributes:
        model: model on whose answers the classifier was trained.
        vocab_size: size of the model's vocabulary; prompts for other models are refused if they can
            be recognised.
        granularity: see ``LengthBuckets``.
        cap: see ``LengthBuckets``.
        rows: see ``bag_of_tokens``.
        num_hidden: see ``Classifier``.
    """

    model: str
    vocab_size: int
    granularity: int
    cap: int
    rows: int = 4096
    num_hidden: int = 32

    @property
    def buckets(self) -> LengthBuckets:
        """The classes between which the classifier chooses."""
        return LengthBuckets(self.granularity, self.cap)


def train_on_prompts(
    prompts: Sequence[Sequence[int]], lengths: Sequence[int], about: About, options: Training
) -> Classifier:
    """Return a classifier trained on these prompts and the lengths of their answers."""
    x_NF = np.stack([bag_of_tokens(prompt, about.rows) for prompt in prompts])
    class_N = np.asarray([about.buckets.of(length) for length in lengths])
    return train(x_NF, class_N, about.buckets.count, about.num_hidden, options)


def save(model: Classifier, about: About, path: Path) -> None:
    """Write a classifier to a safetensors file."""
    arrays = {name: np.asarray(value) for name, value in _parameters(model).items()}
    save_file(arrays, path, {"kind": _KIND, "about": about.model_dump_json()})


def load(path: Path) -> tuple[Classifier, About]:
    """Read a file that ``save`` has written.

    Raises:
        JaxinferError: the file cannot be read, is damaged, or has other contents.
    """
    try:
        with safe_open(path, "numpy") as file:
            header = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except OSError as error:
        raise JaxinferError(f"{path}: {error.strerror or 'there is no such file'}") from None
    except SafetensorError as error:
        raise JaxinferError(f"{path}: no safetensors file: {error}") from None
    if header.get("kind") != _KIND:
        raise JaxinferError(
            f"{path}: no length classifier, as `scripts.reproduce predictor` writes"
        )
    about = About.model_validate(json.loads(header["about"]))
    model = Classifier(about.rows + 1, about.num_hidden, about.buckets.count)
    wanted = {name: value.shape for name, value in _parameters(model).items()}
    if wanted != {name: array.shape for name, array in arrays.items()}:
        raise JaxinferError(f"{path}: damaged: its tensors do not fit what it says of itself")
    _, state = nnx.split(model)
    flat = [(where, arrays[_name(where)]) for where, _ in nnx.to_flat_state(state)]
    nnx.update(model, nnx.from_flat_state(flat))
    return model, about


def _parameters(model: Classifier) -> dict[str, Any]:
    return {_name(where): leaf[...] for where, leaf in nnx.to_flat_state(nnx.state(model))}


def _name(where: tuple[Any, ...]) -> str:
    return ".".join(map(str, where))


class LengthClassifierOptions(Options):
    """Options of ``LengthClassifier``.

    Attributes:
        path: File that ``python -m scripts.reproduce predictor`` has written.
    """

    path: str


class LengthClassifier:
    """Predicts the likeliest bucket of an answer's length, given the prompt.

    Raises:
        JaxinferError: the file does not exist, or is not a classifier.
    """

    Options = LengthClassifierOptions

    def __init__(self, options: LengthClassifierOptions) -> None:
        try:
            model, self._about = load(Path(options.path))
        except JaxinferError as error:
            raise OptionError(f"path: {error}") from None
        self._cpu = jax.devices("cpu")[0]
        with jax.default_device(self._cpu):
            self._likeliest = partial(likeliest, *nnx.split(model))
        # Compiled ahead, so that a run's first request does not wait for it.
        self.bucket_of([0])

    def bucket_of(self, token_ids: Sequence[int]) -> int:
        """Return the likeliest class of the answer to a prompt; this runs on the CPU."""
        bag_F = bag_of_tokens(token_ids, self._about.rows)
        with jax.default_device(self._cpu):
            return int(self._likeliest(bag_F[None])[0])

    def __call__(self, request: PromptView) -> tuple[int, int]:
        """Return the bounds of that bucket."""
        tokens = request.prompt_token_ids
        if not len(tokens):
            raise JaxinferError(
                f"request {request.id!r} has a length but no tokens, which the classifier goes "
                "by: take a trace with prompt_token_ids"
            )
        if (most := max(tokens)) >= self._about.vocab_size:
            raise JaxinferError(
                f"request {request.id!r} has token {most}: the classifier is of "
                f"{self._about.model}, which has {self._about.vocab_size}"
            )
        return self._about.buckets.bounds(self.bucket_of(tokens))
