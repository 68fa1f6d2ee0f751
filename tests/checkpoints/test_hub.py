"""Hub ids: from a cache made by hand, and with the hub's errors injected; no network is used."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import errors
from huggingface_hub.utils import filter_repo_objects

from jaxinfer import JaxinferError
from jaxinfer.checkpoints.checkpoint import open_checkpoint
from jaxinfer.checkpoints.hub import FILES, is_hub_id

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tiny_folder: Path, tmp_path: Path) -> Path:
    """A hub cache with ``org/tiny``, whose branches ``main`` and ``pr/1`` are one commit."""
    repository = tmp_path / "hub" / "models--org--tiny"
    shutil.copytree(tiny_folder, repository / "snapshots" / COMMIT)
    for branch in ("main", "pr/1"):
        reference = repository / "refs" / branch
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text(COMMIT)
    return tmp_path / "hub"


def offline(cache: Path, *models: str) -> list[str]:
    """Return what a process without a network prints of each model: name and place, or error."""
    script = (
        "import sys\n"
        "from jaxinfer.errors import JaxinferError\n"
        "from jaxinfer.checkpoints.checkpoint import open_checkpoint\n"
        "for model in sys.argv[1:]:\n"
        "    try:\n"
        "        opened = open_checkpoint(model)\n"
        "        print(opened.name, opened.path, opened.config.vocab_size)\n"
        "    except JaxinferError as error:\n"
        "        print(error)\n"
    )
    environment = dict(os.environ) | {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script, *models],
        capture_output=True,
        text=True,
        env=environment,
        cwd=cache,
        check=True,
    )
    return done.stdout.splitlines()


def test_a_cached_copy_works_offline(cache: Path) -> None:
    snapshot = cache / "models--org--tiny" / "snapshots" / COMMIT
    models = ["org/tiny", "org/tiny@pr/1", f"org/tiny@{COMMIT}", "org/tiny@v2", "org/other"]
    found = offline(cache, *models)
    assert found[:3] == [f"{model} {snapshot} 260" for model in models[:3]]
    for model, message in zip(models[3:], found[3:], strict=True):
        assert message.startswith(f"no model {model!r}: no such file or folder here; as a hub id,")
        assert "the cache has no complete copy: connect once" in message


def test_a_local_folder_comes_first(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny_folder, tmp_path / "org" / "tiny")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    assert open_checkpoint("org/tiny").path == Path("org/tiny")


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("org/name", True),
        ("HuggingFaceTB/SmolLM2-135M", True),
        ("org/name@refs/pr/1", True),
        ("name", False),
        ("./name", False),
        ("~/name", False),
        ("/org/name", False),
        ("../name", False),
        ("a/b/c", False),
        ("org/", False),
        ("org/name.gguf", False),
        ("org/name@", False),
        ("org/na me", False),
    ],
)
def test_ids(model: str, expected: bool) -> None:
    assert is_hub_id(model) == expected


def test_only_what_is_read_is_fetched(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(repository: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((repository, revision, allow_patterns))
        return str(tiny_folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert open_checkpoint("org/name").name == "org/name"
    open_checkpoint("org/name@v1.0")
    assert [call[:2] for call in asked] == [("org/name", None), ("org/name", "v1.0")]
    assert asked[0][2] == list(FILES)
    wanted = {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
    }
    others = {
        "README.md",
        "pytorch_model.bin",
        "consolidated.safetensors",
        "onnx/model.onnx",
        "original/consolidated.00.pth",
        "tokenizer.model",
        "training_args.bin",
        "pytorch_model.bin.index.json",
        "onnx/config.json",
    }
    assert set(filter_repo_objects(wanted | others, allow_patterns=asked[0][2])) == wanted


ANSWER = SimpleNamespace(headers={}, request=None, status_code=401)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (errors.GatedRepoError("x\ny", response=ANSWER), "it is gated: accept its terms"),
        (errors.RepositoryNotFoundError("x", response=ANSWER), "no such repository, or it is priv"),
        (errors.RevisionNotFoundError("x", response=ANSWER), "no revision 'v9' of it"),
        (errors.LocalEntryNotFoundError("x\ny"), "cannot be reached"),
        (errors.HFValidationError("Repo id must\nuse"), "Repo id must use"),
        (ConnectionError("proxy\nrefused"), "ConnectionError: proxy refused"),
        (OSError(28, "No space left on device"), "No space left on device"),
    ],
)
def test_errors_are_one_line(monkeypatch: pytest.MonkeyPatch, error: Exception, words: str) -> None:
    def fail(*arguments: object, **options: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(JaxinferError) as caught:
        open_checkpoint("org/name@v9")
    message = str(caught.value)
    assert message.startswith("no model 'org/name@v9': no such file or folder here; as a hub id, ")
    assert words in message
    assert "\n" not in message
