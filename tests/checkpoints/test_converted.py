"""Converted checkpoints: the same values as their source's, read shard by shard."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore
from checkpoint_files import plan_alone
from click.testing import CliRunner
from safetensors.numpy import save_file
from tiny_outputs import TINY, outputs

from jaxinfer import LLM, JaxinferError
from jaxinfer.checkpoints import converted
from jaxinfer.checkpoints.checkpoint import open_checkpoint
from jaxinfer.checkpoints.hugging_face import read_folder_config
from jaxinfer.commands.app import cli
from jaxinfer.config.engine import EngineOptions
from jaxinfer.convert import convert
from jaxinfer.models.llama import hf_weights
from jaxinfer.runtime.stage.load_weights import load_parameters

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
ARCHITECTURES = Path(__file__).parents[1] / "data" / "architectures"
BYTES_READ = "/tensorstore/kvstore/file/bytes_read"


@pytest.fixture(scope="module")
def tiny_converted(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(
        str(tiny_folder), str(tmp_path_factory.mktemp("converted") / "tiny"), None, False
    )


def make_model(folder: Path, like: Path, dtype: str = "float32", **changes: int) -> Path:
    """``like``, with other sizes and random weights; norms are no bfloat16 numbers."""
    shutil.copytree(like, folder)
    config = json.loads((like / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(1)
    specs = hf_weights(read_folder_config(folder))
    weights = {str(spec.names): rng.normal(size=spec.shape) for spec in specs.values()}
    save_file(
        {name: array.astype(DTYPES[dtype]) for name, array in weights.items()},
        folder / "model.safetensors",
    )
    return folder


def load(model: Path, devices: int, dtype: str = "float32") -> dict[str, jax.Array]:
    options = EngineOptions.model_validate(TINY | {"tensor_parallel_size": devices, "dtype": dtype})
    checkpoint = open_checkpoint(str(model))
    leaves = jax.tree_util.tree_leaves_with_path(
        load_parameters(checkpoint, [plan_alone(checkpoint.config, options)])[0]
    )
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def assert_same(found: dict[str, jax.Array], expected: dict[str, jax.Array]) -> None:
    """Bit for bit, on every device."""
    assert found.keys() == expected.keys()
    for path, array in expected.items():
        assert found[path].dtype == array.dtype
        assert found[path].sharding == array.sharding
        pairs = zip(found[path].addressable_shards, array.addressable_shards, strict=True)
        for ours, theirs in pairs:
            assert ours.device == theirs.device
            assert ours.data.shape == theirs.data.shape
            assert np.asarray(ours.data).tobytes() == np.asarray(theirs.data).tobytes(), path


def error_of(model: Path, devices: int = 1) -> str:
    with pytest.raises(JaxinferError) as caught:
        load(model, devices)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        # On 3 and 4 devices, some have nothing but padding.
        {"num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 5},
        # More columns than pieces, so that shards end within a piece.
        {"num_attention_heads": 3, "num_key_value_heads": 3, "intermediate_size": 133},
    ],
)
def test_values_are_the_sources(
    tiny_folder: Path, tmp_path: Path, sizes: dict[str, int], devices: int
) -> None:
    source = make_model(tmp_path / "source", tiny_folder, **sizes)
    folder = convert(str(source), str(tmp_path / "new"), None, False)
    assert open_checkpoint(str(folder)).config == open_checkpoint(str(source)).config
    assert_same(load(folder, devices), load(source, devices))


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("loaded", ["float32", "bfloat16"])
def test_the_stored_type_is_kept(
    tiny_folder: Path, tmp_path: Path, stored: str, loaded: str
) -> None:
    source = make_model(tmp_path / "source", tiny_folder, stored)
    folder = convert(str(source), str(tmp_path / "new"), None, False)
    assert_same(load(folder, 2, loaded), load(source, 2, loaded))
    kinds = stored_kinds(folder)
    assert kinds["layers.0.mlp.gate_DF"] == stored
    assert kinds["norm.scale_D"] == "float32"


def stored_kinds(folder: Path) -> dict[str, str]:
    """Types on disk, as Orbax sees them."""
    with ocp.PyTreeCheckpointer() as checkpointer:
        metadata = checkpointer.metadata(folder / "parameters").item_metadata
    return {path: np.dtype(array.dtype).name for path, array in metadata.tree.items()}


def test_conversion_to_bfloat16_rounds_matrices_alone(tiny_folder: Path, tmp_path: Path) -> None:
    source = make_model(tmp_path / "source", tiny_folder)
    folder = convert(str(source), str(tmp_path / "new"), "bfloat16", False)
    expected = load(source, 1)
    for path, array in load(folder, 1).items():
        values = np.asarray(expected[path])
        rounded = values if values.ndim == 1 else values.astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(np.asarray(array), rounded.astype(np.float32))
    kinds = stored_kinds(folder)
    assert kinds["norm.scale_D"] == "float32"
    assert {kind for path, kind in kinds.items() if "scale" not in path} == {"bfloat16"}


@pytest.mark.parametrize("devices", [1, 3])
def test_tokens_are_the_sources(tiny: LLM, tiny_converted: Path, devices: int) -> None:
    llm = LLM(str(tiny_converted), progress=False, tensor_parallel_size=devices, **TINY)
    assert outputs(llm) == outputs(tiny)


def count_bytes() -> int:
    """Read from files by this process, through TensorStore."""
    (metric,) = tensorstore.experimental_collect_matching_metrics(BYTES_READ)
    return metric["values"][0]["value"]


def stored_arrays(folder: Path, paths: Iterable[str]) -> dict[str, tensorstore.TensorStore]:
    """Open the arrays by TensorStore alone, with the index in a cache and nothing else."""
    context = tensorstore.Context({"cache_pool#index": {"total_bytes_limit": 10**8}})
    base = {"driver": "file", "path": f"{folder}/parameters/"}
    kvstore = {"driver": "ocdbt", "base": base, "cache_pool": "cache_pool#index"}
    specs = {p: {"driver": "zarr", "kvstore": kvstore | {"path": f"{p}/"}} for p in paths}
    return {p: tensorstore.open(spec, context=context).result() for p, spec in specs.items()}


def bytes_for_each_device(folder: Path, devices: int) -> list[tuple[int, int]]:
    """Return, for each device, the bytes that reading its shards reads, and the shards' size."""
    plan = plan_alone(
        open_checkpoint(str(folder)).config,
        EngineOptions.model_validate(TINY | {"tensor_parallel_size": devices}),
    )
    # The others are whole on each device.
    shared = [path for path in plan.parameters if ".attn." in path or ".mlp." in path]
    arrays = stored_arrays(folder, shared)
    for array in arrays.values():
        array.read().result()  # The index is cached from here on.
    found = []
    for device in plan.devices:
        size, before = 0, count_bytes()
        for path in shared:
            wanted = plan.parameters[path]
            index = wanted.sharding.devices_indices_map(wanted.shape)[device]  # type: ignore[union-attr]
            bounds = [s.indices(n)[:2] for s, n in zip(index, arrays[path].shape, strict=True)]
            shard = arrays[path][tuple(slice(*bound) for bound in bounds)]
            size += shard.read().result().nbytes
        found.append((count_bytes() - before, size))
    return found


def test_a_device_reads_only_its_shards(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Pieces of more than a kibibyte: TensorStore puts shorter ones into the index.
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16}
    sizes["intermediate_size"] = 2048
    source = make_model(tmp_path / "source", tiny_folder, **sizes)
    folder = convert(str(source), str(tmp_path / "new"), None, False)
    for devices in (1, 2, 4):
        for read, size in bytes_for_each_device(folder, devices):
            assert read == size
    # Feed-forward shards of a third end within one of 32 pieces.
    for read, size in bytes_for_each_device(folder, 3):
        assert size < read < 1.12 * size

    # What restoring reads for all devices together: everything once.
    whole = sum(array.nbytes for array in load(source, 1).values())
    for devices in (1, 2, 3, 4):
        before = count_bytes()
        load(folder, devices)
        assert 0.9 * whole < count_bytes() - before < 1.1 * whole

    monkeypatch.setattr(converted, "chunk_shape", lambda path, shape: shape)
    uncut = convert(str(source), str(tmp_path / "uncut"), None, False)
    assert all(read > 2 * size for read, size in bytes_for_each_device(uncut, 4))


def test_pieces(tiny_converted: Path) -> None:
    """The pieces on disk, as TensorStore tells, are heads and at most 32 of each longer axis."""
    expected = {
        "embed_VD": [9, 32],
        "layers.1.attn.q_DNH": [32, 1, 8],
        "layers.1.attn.o_NHD": [1, 8, 32],
        "layers.0.mlp.gate_DF": [32, 2],
        "layers.0.mlp.down_FD": [2, 32],
        "norm.scale_D": [32],
    }
    for path, array in stored_arrays(tiny_converted, expected).items():
        assert list(array.chunk_layout.read_chunk.shape) == expected[path]


class TestDestination:
    def test_from_the_command_line(self, tiny_folder: Path, tmp_path: Path) -> None:
        folder = tmp_path / "new"
        done = invoke("convert", tiny_folder, folder, "--dtype", "bfloat16")
        assert done.exit_code == 0
        assert f"{folder}: " in done.output
        assert stored_kinds(folder)["embed_VD"] == "bfloat16"
        settings = [f"--set=engine.{name}={value}" for name, value in TINY.items()]
        explained = invoke("explain", "--model", folder, *settings)
        assert "layers.*.mlp.down_FD" in explained.output

    def test_nothing_is_overwritten_unasked(self, tiny_folder: Path, tmp_path: Path) -> None:
        folder = tmp_path / "new"
        folder.mkdir()
        other = make_model(tmp_path / "other", tiny_folder)
        convert(str(tiny_folder), str(folder), None, False)
        before = load(folder, 1)
        with pytest.raises(JaxinferError, match="new exists; --force overwrites it"):
            convert(str(other), str(folder), None, False)
        assert_same(load(folder, 1), before)
        convert(str(other), str(folder), None, True)
        assert_same(load(folder, 1), load(other, 1))

    def test_nothing_but_a_converted_folder_is_overwritten(
        self, tiny_folder: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "file").write_text("mine")
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / "file").write_text("mine")
        for name, message in (
            ("file", "is a file"),
            ("folder", "no converted model"),
            ("a/b", "there is no folder"),
        ):
            with pytest.raises(JaxinferError, match=message):
                convert(str(tiny_folder), str(tmp_path / name), None, True)
        assert (tmp_path / "folder" / "file").read_text() == "mine"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]

    def test_a_converted_source_is_refused(self, tiny_converted: Path, tmp_path: Path) -> None:
        with pytest.raises(JaxinferError, match="is converted already"):
            convert(str(tiny_converted), str(tmp_path / "new"), None, False)
        assert not list(tmp_path.iterdir())

    def test_a_disk_with_too_little_room(
        self, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        size = sum(array.nbytes for array in load(tiny_folder, 1).values())
        for free in (size, size - 1):
            monkeypatch.setattr(converted, "disk_usage", lambda _, f=free: SimpleNamespace(free=f))
            if free == size:
                convert(str(tiny_folder), str(tmp_path / "fits"), None, False)
                continue
            with pytest.raises(JaxinferError, match="the parameters take 0 MiB, 0 MiB are free"):
                convert(str(tiny_folder), str(tmp_path / "new"), None, False)
        assert [path.name for path in tmp_path.iterdir()] == ["fits"]

    @pytest.mark.parametrize("error", [KeyboardInterrupt(), JaxinferError("full")])
    def test_a_failure_leaves_nothing(
        self,
        tiny_folder: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        error: BaseException,
    ) -> None:
        def fail(*arguments: object) -> None:
            raise error

        monkeypatch.setattr("jaxinfer.convert.write", fail)
        with pytest.raises(type(error)):
            convert(str(tiny_folder), str(tmp_path / "new"), None, False)
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize(
        "moment",
        [
            "import jaxinfer.checkpoints.converted as m; old = m._write_arrays;"
            "m._write_arrays = lambda *a: (old(*a), os._exit(9))",
            "import jaxinfer.convert as m; m._replace = lambda *a: os._exit(9)",
        ],
        ids=["before the manifest", "before the name"],
    )
    def test_a_killed_convert_leaves_nothing_that_loads(
        self, tiny_folder: Path, tmp_path: Path, moment: str
    ) -> None:
        folder = tmp_path / "new"
        script = "import os, sys; from jaxinfer.convert import convert;"
        script += f"{moment}; convert(*sys.argv[1:], None, False)"
        command = [sys.executable, "-c", script, tiny_folder, folder]
        killed = subprocess.run(list(map(str, command)), check=False)
        assert killed.returncode == 9
        assert (tmp_path / "new.partial").is_dir()
        with pytest.raises(JaxinferError, match="no model"):
            open_checkpoint(str(folder))
        with pytest.raises(JaxinferError, match=r"new.partial exists: another .* --force"):
            convert(str(tiny_folder), str(folder), None, False)
        convert(str(tiny_folder), str(folder), None, True)
        assert_same(load(folder, 1), load(tiny_folder, 1))
        assert [path.name for path in tmp_path.iterdir()] == ["new"]


def invoke(*arguments: str | Path) -> Any:
    return CliRunner().invoke(cli, list(map(str, arguments)), catch_exceptions=False)


class TestDamage:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"version": 2}, "version is 2, must be 1"),
            ({"version": None}, "version is None, must be 1"),
            ({"notes": "x"}, "notes: "),
            ({"shapes": None}, "shapes: "),
            ({"config": {"rope_base": 3.0}}, "config.rope_base: "),
            ({"config": {"vocab_size": "260"}}, "config.vocab_size: "),
            ({"config": {"architecture": "GPT"}}, "config.architecture is 'GPT', must be one of"),
        ],
    )
    def test_manifest(
        self, tiny_converted: Path, tmp_path: Path, change: dict[str, Any], message: str
    ) -> None:
        folder = shutil.copytree(tiny_converted, tmp_path / "new")
        manifest = json.loads((folder / "jaxinfer.json").read_text())
        if isinstance(change.get("config"), dict):
            change = {"config": manifest["config"] | change["config"]}
        (folder / "jaxinfer.json").write_text(json.dumps(manifest | change))
        found = error_of(folder)
        assert "jaxinfer.json" in found
        assert message in found

    def test_manifest_without_a_field(self, tiny_converted: Path, tmp_path: Path) -> None:
        folder = shutil.copytree(tiny_converted, tmp_path / "new")
        manifest = json.loads((folder / "jaxinfer.json").read_text())
        del manifest["config"]["head_dim"]
        (folder / "jaxinfer.json").write_text(json.dumps(manifest))
        assert "config.head_dim: " in error_of(folder)

    def test_manifest_cut(self, tiny_converted: Path, tmp_path: Path) -> None:
        folder = shutil.copytree(tiny_converted, tmp_path / "new")
        text = (folder / "jaxinfer.json").read_text()
        (folder / "jaxinfer.json").write_text(text[:-20])
        assert "jaxinfer.json: not valid JSON" in error_of(folder)

    @pytest.mark.parametrize("devices", [1, 3])
    def test_config_that_does_not_fit_the_arrays(
        self, tiny_converted: Path, tmp_path: Path, devices: int
    ) -> None:
        """Arrays are neither cut nor filled up with zeros."""
        for size in (63, 66):
            folder = shutil.copytree(tiny_converted, tmp_path / str(size))
            manifest = json.loads((folder / "jaxinfer.json").read_text())
            manifest["config"]["intermediate_size"] = size
            (folder / "jaxinfer.json").write_text(json.dumps(manifest))
            message = error_of(folder, devices)
            assert "layers.0.mlp.down_FD has shape (64, 32)" in message
            assert f"wants ({size}, 32)" in message

    @pytest.mark.parametrize("how", ["removed", "empty", "half"])
    def test_any_file_of_the_arrays(self, tiny_converted: Path, tmp_path: Path, how: str) -> None:
        files = [p for p in (tiny_converted / "parameters").rglob("*") if p.is_file()]
        assert len(files) > 5
        for number, file in enumerate(files):
            folder = shutil.copytree(tiny_converted, tmp_path / str(number))
            victim = folder / file.relative_to(tiny_converted)
            content = victim.read_bytes()
            victim.unlink()
            if how != "removed":
                victim.write_bytes(content[: len(content) // 2 if how == "half" else 0])
            message = error_of(folder, 2)
            assert message.startswith(f"{victim}: ")
            assert ("missing" if how == "removed" else f"must be {len(content)};") in message

    def test_a_file_that_has_grown(self, tiny_converted: Path, tmp_path: Path) -> None:
        folder = shutil.copytree(tiny_converted, tmp_path / "copy")
        victim = next(p for p in (folder / "parameters").rglob("*") if p.is_file())
        victim.write_bytes(victim.read_bytes() + b"x")
        size = victim.stat().st_size
        assert error_of(folder, 2).startswith(f"{victim}: {size} bytes long, must be {size - 1};")

    def test_index(
        self, tiny_converted: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """The index finds other bytes in files of the right length."""
        messages = []
        files = [p for p in (tiny_converted / "parameters").rglob("*") if p.is_file()]
        for number, file in enumerate(files):
            folder = shutil.copytree(tiny_converted, tmp_path / str(number))
            victim = folder / file.relative_to(tiny_converted)
            victim.write_bytes(bytes(victim.stat().st_size))
            try:
                load(folder, 2)
            except JaxinferError as error:
                messages.append(str(error).removeprefix(str(folder)))
        # _METADATA, the manifest, and at least one node of the tree.
        assert len(messages) > 2
        for message in messages:
            assert message.startswith("/parameters: damaged, convert the model again: ")
            assert "\n" not in message
            assert len(message) < 600
        assert capfd.readouterr().err == ""

    def test_no_arrays(self, tiny_converted: Path, tmp_path: Path) -> None:
        folder = shutil.copytree(tiny_converted, tmp_path / "new")
        shutil.rmtree(folder / "parameters")
        assert "missing; copy" in error_of(folder)


@pytest.mark.parametrize("name", ["gemma3", "mixtral", "opt", "qwen3_moe_unnormalised"])
def test_every_kind_of_configuration_comes_back(
    tiny_folder: Path, tmp_path: Path, name: str
) -> None:
    """Windows, two kinds of rotation, experts and their shares, learned positions."""
    source = tmp_path / "source"
    shutil.copytree(ARCHITECTURES / name, source)
    shutil.copy(tiny_folder / "tokenizer.json", source)
    folder = convert(str(source), str(tmp_path / "converted"), None, False)
    assert open_checkpoint(str(folder)).config == open_checkpoint(str(source)).config
    assert_same(load(folder, 2), load(source, 2))
