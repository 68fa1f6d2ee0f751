"""Whether a model is told from others under its name, and a copy of it taken for the same."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import make_gguf, make_sharded, make_weights
from tiny_model import write_tiny_model

from jaxinfer import JaxinferError
from jaxinfer.checkpoints import fingerprint as module
from jaxinfer.checkpoints.fingerprint import fingerprint
from jaxinfer.convert import convert


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "tiny"
    path.mkdir()
    (path / "generation_config.json").write_text('{"eos_token_id": 256}')
    (path / "README.md").write_text("of no influence")
    return write_tiny_model(path)


def one_weight(folder: Path) -> None:
    """Change a single number in the middle of the weights, and leave the time of change."""
    path = folder / "model.safetensors"
    status = path.stat()
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")


def edit(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        values = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(values | {"eos_token": "<user>"}))

    return change


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (one_weight, "model.safetensors"),
        (template, "chat_template.jinja"),
        (edit("config.json"), "config.json"),
        (edit("generation_config.json"), "generation_config.json"),
        (edit("tokenizer_config.json"), "tokenizer_config.json"),
        (edit("tokenizer.json"), "tokenizer.json"),
    ],
)
def test_each_file_that_decides(folder: Path, change: Callable[[Path], None], name: str) -> None:
    before = fingerprint(str(folder))
    change(folder)
    after = fingerprint(str(folder), known=before).digests
    assert {key for key in after if after[key] != before.digests.get(key)} == {name}


def test_a_copy_is_the_same(folder: Path, tmp_path: Path) -> None:
    """Other times of change, and other files beside it."""
    shutil.copytree(folder, tmp_path / "copy", copy_function=shutil.copyfile)
    (tmp_path / "copy" / "README.md").write_text("other")
    found, copied = fingerprint(str(folder)), fingerprint(str(tmp_path / "copy"))
    assert found.digests == copied.digests
    assert "README.md" not in found.digests
    assert found.stamps != copied.stamps


def test_large_files_are_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SMALL", 10_000)
    read: list[str] = []
    digest = module._digest

    def count(path: Path, size: int) -> str:
        read.append(path.name)
        return digest(path, size)

    monkeypatch.setattr(module, "_digest", count)
    first = fingerprint(str(folder))
    assert "model.safetensors" in read
    read.clear()
    assert fingerprint(str(folder), known=first) == first
    assert "config.json" in read
    assert "model.safetensors" not in read
    os.utime(folder / "model.safetensors")
    assert fingerprint(str(folder), known=first).digests == first.digests
    assert "model.safetensors" in read


def test_dummy_weights_need_no_files(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "config.json" in fingerprint(str(folder), "dummy").digests


def test_files_of_an_index(tmp_path: Path) -> None:
    """Whatever their names are."""
    make_sharded(tmp_path / "m", make_weights())
    index = tmp_path / "m" / "model.safetensors.index.json"
    first = "model-00001-of-00002.safetensors"
    (tmp_path / "m" / first).rename(tmp_path / "m" / "first.safetensors")
    index.write_text(index.read_text().replace(first, "first.safetensors"))
    assert "first.safetensors" in fingerprint(str(tmp_path / "m")).digests


def test_gguf_files_of_a_split(tmp_path: Path) -> None:
    names = [f"a-0000{n}-of-00002.gguf" for n in (1, 2)]
    for name in names:
        (tmp_path / name).write_bytes(name.encode())
    assert list(fingerprint(str(tmp_path / names[1])).digests) == names
    alone = make_gguf(tmp_path / "alone.gguf", make_weights())
    before = fingerprint(str(alone)).digests
    weights = {name: np.negative(array) for name, array in make_weights().items()}
    make_gguf(alone, weights)
    assert before.keys() == {"alone.gguf"}
    assert fingerprint(str(alone)).digests != before


def test_a_converted_folder(folder: Path, tmp_path: Path) -> None:
    convert(str(folder), str(tmp_path / "converted"), None, force=False)
    found = fingerprint(str(tmp_path / "converted")).digests
    assert {"jaxinfer.json", "tokenizer.json", "generation_config.json"} < found.keys()
    assert any(name.startswith("parameters/") for name in found)


def test_the_hub_s_cache_names_its_files(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large file there is a link to one under its digest, and need not be read."""
    monkeypatch.setattr(module, "_SMALL", 10_000)
    (tmp_path / "blobs").mkdir()
    shutil.move(folder / "model.safetensors", tmp_path / "blobs" / "abc")
    (folder / "model.safetensors").symlink_to(tmp_path / "blobs" / "abc")
    assert fingerprint(str(folder)).digests["model.safetensors"] == "abc"


@pytest.mark.parametrize("model", ["no/such/folder", "missing.gguf"])
def test_no_such_model(model: str) -> None:
    with pytest.raises(JaxinferError, match=model):
        fingerprint(model)


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    make_sharded(tmp_path / "m", make_weights())
    (tmp_path / "m" / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(JaxinferError, match=r"00002\.safetensors: cannot read the file: No such"):
        fingerprint(str(tmp_path / "m"))
