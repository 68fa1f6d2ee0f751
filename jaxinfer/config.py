"""Options and run files: what a user may set, checked before anything is loaded."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field

from jaxinfer.errors import JaxinferError
from jaxinfer.validation import Options


class EngineOptions(Options):
    """How a model is run. Names follow vLLM where it has the option.

    Attributes:
        dtype: of weights and KV cache; ``auto`` is float32 on CPU and bfloat16 on GPU.
        tensor_parallel_size: devices that share each layer.
        sharding: a Python file whose ``RULES`` say how parameters lie on those devices, in
            place of those of ``jaxinfer.models.sharding``.
        page_size: tokens per KV page.
        num_pages: size of the KV pool, one padding page included; by default as many as
            ``memory_fraction`` allows and as could be of use.
        memory_fraction: of a GPU's memory, for weights and KV together (default 0.9); on CPU, of
            the memory available when the engine starts, for KV (default 0.2).
        max_num_seqs: requests that run at once, at most.
        max_num_batched_tokens: tokens computed in one step, at most.
        max_model_len: prompt and output tokens of one request, at most; by default what the
            model was made for.
        enable_prefix_caching: keep full pages after a request's end, and start requests that
            begin alike with them.
        launch_ahead: start a decode before the token it follows has reached the host.
        strict_shapes: a step that was not compiled ahead is an error.
        seed: requests without a seed of their own get one from this and their id.
    """

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    tensor_parallel_size: int = Field(default=1, ge=1)
    sharding: str | None = None
    page_size: int = Field(default=64, ge=1, le=1024)
    num_pages: int | None = Field(default=None, ge=2)
    memory_fraction: float | None = Field(default=None, gt=0, le=1)
    max_num_seqs: int = Field(default=64, ge=1)
    max_num_batched_tokens: int = Field(default=512, ge=1)
    max_model_len: int | None = Field(default=None, ge=2)
    enable_prefix_caching: bool = True
    launch_ahead: bool = True
    strict_shapes: bool = False
    seed: int = Field(default=0, ge=0)

    def model_post_init(self, context: Any, /) -> None:
        """Refuse combinations that cannot work."""
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise JaxinferError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, must be at least "
                f"max_num_seqs, {self.max_num_seqs}: every running request decodes in one step"
            )


class WorkloadFiles(Options):
    """Where a batch comes from and where its results go."""

    input: str | None = None
    output: str | None = None


class RunFile(Options):
    """A YAML file that says what to run."""

    model: str | None = None
    engine: EngineOptions = EngineOptions()
    workload: WorkloadFiles = WorkloadFiles()

    def require_model(self) -> str:
        """The model.

        Raises:
            JaxinferError: none is named.
        """
        if self.model is None:
            raise JaxinferError("no model: give --model, or model in the run file")
        return self.model


def load_run_file(path: str | Path | None, settings: Sequence[str] = ()) -> RunFile:
    """Read a run file, or start from nothing, and apply settings such as ``engine.seed=1``.

    Raises:
        JaxinferError: the file or a setting is not what it should be.
    """
    data = _read_yaml(Path(path)) if path else {}
    for setting in settings:
        _apply(data, setting)
    try:
        for name, field in RunFile.model_fields.items():
            if name in data and isinstance(field.default, Options):
                data[name] = _section(name, type(field.default), data[name])
        return RunFile.model_validate(data)
    except JaxinferError as error:
        raise JaxinferError(f"{path}: {error}" if path else str(error)) from None


def _section(name: str, kind: type[Options], data: object) -> Options:
    try:
        return kind.model_validate(data)
    except JaxinferError as error:
        raise JaxinferError(f"{name}: {error}") from None


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise JaxinferError(f"run file {path}: {reason}") from None
    except yaml.YAMLError as error:
        raise JaxinferError(f"run file {path}: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise JaxinferError(f"run file {path}: must be a mapping of model, engine, workload")
    return data


def _apply(data: dict[str, Any], setting: str) -> None:
    key, equals, value = setting.partition("=")
    *path, last = key.split(".")
    if not equals or not all([*path, last]):
        raise JaxinferError(f"--set {setting!r}: must look like engine.max_num_seqs=16")
    for name in path:
        data = data.setdefault(name, {})
        if not isinstance(data, dict):
            raise JaxinferError(f"--set {setting!r}: {name!r} holds no options")
    try:
        data[last] = yaml.safe_load(value)
    except yaml.YAMLError:
        raise JaxinferError(f"--set {setting!r}: {value!r} is not a YAML value") from None
