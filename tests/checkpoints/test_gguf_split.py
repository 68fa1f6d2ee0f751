"""GGUF files that are split, as gguf's own writer splits them."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from checkpoint_files import GGUF_NAMES, error_of, make_gguf, make_weights

from jaxinfer.checkpoints.checkpoint import open_checkpoint
from jaxinfer.checkpoints.gguf_file import read_gguf


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gguf(tmp_path_factory.mktemp("whole") / "tiny.gguf", make_weights())


def split(whole: Path, folder: Path) -> list[Path]:
    """The same file in three, by ``GGUFWriter``."""
    file = read_gguf(whole)
    writer = gguf.GGUFWriter(folder / "tiny.gguf", "llama", split_max_tensors=4)
    for key, value in file.metadata.items():
        if isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
    for name, tensor in file.tensors.items():
        writer.add_tensor(name, tensor.load())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    paths = sorted(folder.glob("*.gguf"))
    assert [path.name for path in paths] == [f"tiny-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    return paths


@pytest.mark.parametrize("given", [0, 1, 2])
def test_any_of_the_files_opens_the_whole(whole: Path, tmp_path: Path, given: int) -> None:
    wanted = open_checkpoint(str(whole))
    opened = open_checkpoint(str(split(whole, tmp_path)[given]))
    assert opened.config == wanted.config
    assert opened.path == tmp_path / "tiny-00001-of-00003.gguf"
    assert opened.tensors.keys() == wanted.tensors.keys()
    for name, tensor in opened.tensors.items():
        np.testing.assert_array_equal(tensor.load(), wanted.tensors[name].load())


@pytest.mark.parametrize("missing", [0, 1])
def test_a_missing_file_is_named(whole: Path, tmp_path: Path, missing: int) -> None:
    paths = split(whole, tmp_path)
    paths[missing].unlink()
    message = error_of(lambda: open_checkpoint(str(paths[2])))
    assert f"{paths[missing]}: missing, one of the 3 files of a split" in message


def test_files_under_other_names(whole: Path, tmp_path: Path) -> None:
    paths = split(whole, tmp_path)
    alone = paths[0].rename(tmp_path / "renamed.gguf")
    message = error_of(lambda: open_checkpoint(str(alone)))
    assert "renamed.gguf: split.count is 3, so the file must be named" in message
    assert "NAME-00001-of-00003.gguf" in message
    # Of another split, by its name.
    alone = alone.rename(tmp_path / "tiny-00001-of-00004.gguf")
    message = error_of(lambda: open_checkpoint(str(alone)))
    assert "00004.gguf: split.count is 3, so the file must be named" in message
    alone.rename(paths[0])
    paths[1].write_bytes(paths[2].read_bytes())
    message = error_of(lambda: open_checkpoint(str(paths[0])))
    assert "tiny-00002-of-00003.gguf: split.no is 2, must be 1" in message


def test_tensors_that_are_there_twice_or_not_at_all(whole: Path, tmp_path: Path) -> None:
    paths = split(whole, tmp_path)
    content = paths[1].read_bytes()
    first = list(read_gguf(paths[0]).tensors)[-1]
    second = next(name for name in read_gguf(paths[1]).tensors if len(name) == len(first))
    assert {first, second} <= set(GGUF_NAMES.values())
    paths[1].write_bytes(content.replace(second.encode(), first.encode()))
    message = error_of(lambda: open_checkpoint(str(paths[0])))
    assert f"tiny-00002-of-00003.gguf: has {first!r}, which an earlier file has too" in message
    paths[1].write_bytes(content)
    head = paths[0].read_bytes()
    at = head.index(b"split.tensors.count") + len("split.tensors.count") + 4
    assert head[at] == len(GGUF_NAMES)
    for count in (10, 12):
        paths[0].write_bytes(head[:at] + bytes([count]) + head[at + 1 :])
        message = error_of(lambda: open_checkpoint(str(paths[0])))
        assert f"split.tensors.count is {count}, must be 11: so many are in the files" in message
