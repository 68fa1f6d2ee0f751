"""Fetches models of the Hugging Face hub into its own cache."""

import re
from pathlib import Path

from jaxinfer.errors import JaxinferError, one_line

# All files that ``open_checkpoint`` and ``load_tokenizer`` read. Not *.safetensors, because some
# repositories have the same weights again under another name.
FILES = (
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.*",
)

_ID = re.compile(r"(?P<repository>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w./-]+))?", re.ASCII)


def is_hub_id(model: str) -> bool:
    """Tell whether ``model`` looks like ``org/name`` or ``org/name@revision``."""
    return _ID.fullmatch(model) is not None and not model.endswith(".gguf")


def fetch(model: str, weights: bool = True) -> Path:
    """Return the folder of ``model`` in the hub's cache; download missing files.

    If the hub cannot be reached, a complete copy in the cache is used.

    Args:
        model: ``org/name``, or ``org/name@revision`` with a branch, a tag or a commit.
        weights: whether to fetch the safetensors.

    Raises:
        JaxinferError: there is no such repository or revision, it is gated, or the hub cannot be
            reached and the cache has no complete copy.
    """
    match = _ID.fullmatch(model)
    assert match, model
    # Imported here, because it is slow and local models do not need it.
    from huggingface_hub import errors, snapshot_download

    wanted = [name for name in FILES if weights or "safetensors" not in name]
    try:
        return Path(
            snapshot_download(
                match["repository"], revision=match["revision"], allow_patterns=wanted
            )
        )
    except errors.GatedRepoError:
        reason = "it is gated: accept its terms on the hub, then run hf auth login or set HF_TOKEN"
    except errors.RepositoryNotFoundError:
        reason = "the hub has no such repository, or it is private: check the id, or set HF_TOKEN"
    except errors.RevisionNotFoundError:
        reason = (
            f"the hub has no revision {match['revision']!r} of it: name a branch, tag or commit"
        )
    except errors.LocalEntryNotFoundError:
        reason = (
            "the hub cannot be reached (or HF_HUB_OFFLINE is set) and the cache has no complete "
            "copy: connect once, set HF_HOME to a cache that has it, or give a local folder"
        )
    except errors.HFValidationError as error:
        reason = one_line(error)[:300]
    # Errors of the network and the disk have types of several libraries.
    except Exception as error:
        reason = f"fetching it failed: {type(error).__name__}: {one_line(error)[:300]}"
    raise JaxinferError(f"no model {model!r}: no such file or folder here; as a hub id, {reason}")
