"""Sampling defaults from a model's ``generation_config.json``, used as in vLLM."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxinfer.checkpoints.open_tensors import Checkpoint
from jaxinfer.errors import JaxinferError
from jaxinfer.files.shipped import data_path
from jaxinfer.models.config_keys import Keys
from jaxinfer.options.validation import read_json
from jaxinfer.request import SamplingParams

FILE = "generation_config.json"
# Hugging Face's names, and ours. vLLM ignores all others, including do_sample.
_NAMES = {
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}


@dataclass(frozen=True)
class Generation:
    """Default sampling options, for those that a request leaves out.

    Attributes:
        defaults: default values by field name of ``SamplingParams``.
        most_tokens: limit on the output tokens of each line of a batch.
        eos_token_ids: tokens that end a text, in addition to the model's own.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    most_tokens: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def params(self) -> SamplingParams:
        """Return the sampling parameters for a call that gives none."""
        return SamplingParams(**self.defaults)

    def complete(self, given: SamplingParams) -> SamplingParams:
        """Fill in the options that a line of a batch leaves out.

        Raises:
            JaxinferError: a default is incompatible with a given value.
        """
        missing = {n: v for n, v in self.defaults.items() if n not in given.model_fields_set}
        found = dict(given) | missing
        if self.most_tokens:
            found["max_tokens"] = min(found["max_tokens"], self.most_tokens)
        return given if found == dict(given) else SamplingParams.model_validate(found)


def read_generation(checkpoint: Checkpoint, choice: str) -> Generation:
    """Read the default sampling options that ``choice`` names.

    Args:
        choice: ``auto``: the model's own; ``vllm``: none; or a folder with the file. Its
            ``max_new_tokens`` is a limit for all lines.

    Raises:
        JaxinferError: the file is missing or damaged, or a value is not supported.
    """
    if choice == "vllm" or (choice == "auto" and not checkpoint.path.is_dir()):
        return Generation()
    folder = checkpoint.path if choice == "auto" else data_path(Path(choice).expanduser())
    path = folder / FILE
    if not path.is_file():
        if choice == "auto":
            return Generation()
        raise JaxinferError(
            f"generation_config is {choice!r}: must be auto, vllm or a folder with {FILE}"
        )
    values = read_json(path)
    defaults = {
        ours: values[theirs] for theirs, ours in _NAMES.items() if values.get(theirs) is not None
    }
    try:
        SamplingParams(**defaults)
    except JaxinferError as error:
        raise JaxinferError(
            f"{path}: {error}; generation_config: vllm leaves its sampling out"
        ) from None
    if choice == "auto":
        return Generation(defaults)
    ends = tuple(Keys(path, values).tokens("eos_token_id"))
    return Generation(defaults, defaults.get("max_tokens"), ends)
