"""Records a run's origin: what was asked for, by which code, on which machine and when."""

import hashlib
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import jaxinfer
from jaxinfer.config.run_file import RunFile
from jaxinfer.files.contents import contents
from jaxinfer.files.made_from import cpu_name, version_of
from jaxinfer.files.shipped import SHIPPED, data_path
from jaxinfer.workload.lengths import BenchRequest

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "numba", "transformers", "tokenizers")
# What a simulation and draws of lengths go by, beside the run file: no file of a user's.
FACTS = (SHIPPED / "gpus.yaml", SHIPPED / "models.yaml")
_LENGTHS = SHIPPED / "lengths.yaml"


def asked_for(
    config: RunFile, work: Iterable[BenchRequest] | None = None, facts: Iterable[Path] = ()
) -> dict[str, Any]:
    """The request for a run, as JSON values of ``run.json``, from which it can be run again.

    Args:
        work: the requests, as far as they come from ``config``'s workload, a trace or draws.
        facts: files that ship, besides those that ``config`` names, that matter.
    """
    data = config.model_dump(mode="json", exclude_unset=True)
    workload = config.workload.model_dump(mode="json", exclude_none=True)
    if work is not None:
        workload["requests"], workload["sha256"] = digest(work)
    if config.workload.synthetic:
        facts = [*facts, _LENGTHS]
    return {"run_file": data, "workload": workload, "files": files_of(data, facts)}


def digest(work: Iterable[BenchRequest]) -> tuple[int, str]:
    """The number of requests, and the SHA-256 of all that they are."""
    count, found = 0, hashlib.sha256()
    for item in work:
        found.update(repr(item).encode())
        count += 1
    return count, found.hexdigest()


def files_of(run_file: dict[str, Any], facts: Iterable[Path] = ()) -> dict[str, str]:
    """The SHA-256 of each file that a run file names, but for a batch's and one of weights.

    Args:
        run_file: what it holds; ``facts``: more files.
    """
    if str(run_file.get("model")).endswith(".gguf"):
        run_file = run_file | {"model": None}
    if workload := run_file.get("workload"):
        run_file = run_file | {"workload": workload | {"input": None, "output": None}}
    found = contents([run_file, *map(str, facts)], False)
    return {_shown(path): sha256 for path, sha256 in found.items()}


def recorded_path(name: str) -> Path:
    """The file that ``files_of`` calls so; of facts, that which ships, whatever else is there."""
    facts = {_shown(str(fact)): fact for fact in (*FACTS, _LENGTHS)}
    return facts.get(name) or data_path(name)


def _shown(path: str) -> str:
    """A path for the record: the name alone of what ships, since its place differs by machine."""
    inside = Path(path).is_relative_to(SHIPPED)
    return f"configs/{Path(path).relative_to(SHIPPED).as_posix()}" if inside else path


def origin() -> dict[str, object]:
    """Command, versions, machine and time, as JSON values of ``run.json``."""
    commit, dirty = checkout()
    return {
        "command": command_line(),
        "folder": os.getcwd(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "uncommitted_changes": dirty,
        "versions": versions(),
        "python": sys.version.split()[0],
        "machine": _machine(),
    }


def command_line() -> str:
    """The command that this process was started by, to be pasted into a shell."""
    program, *arguments = sys.argv or [""]
    path = Path(program)
    name = path.parent.name if path.name == "__main__.py" else path.name
    return shlex.join([name or "python", *arguments])


@lru_cache(1)
def versions() -> dict[str, str | None]:
    """Versions of this package and of others that matter; None for one that is not installed."""
    return {"jaxinfer": jaxinfer.__version__} | {name: version_of(name) for name in PACKAGES}


@lru_cache(1)
def checkout() -> tuple[str | None, bool | None]:
    """The commit that this code is of, and whether it was changed since; None of a wheel's."""
    root = Path(jaxinfer.__file__).parents[1]
    if not (root / ".git").exists():
        return None, None
    ask = ("git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    try:
        said = subprocess.run(ask, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None, None
    commit, _, dirty = said.stdout.strip().partition("-")
    return commit, bool(dirty)


def made_by_another(run: Mapping[str, Any]) -> str:
    """Say which version or commit made a run, by its ``run.json``, if it is not this one."""
    version = (run.get("versions") or {}).get("jaxinfer")
    if version != jaxinfer.__version__:
        return f"the run was made by version {version}, this is {jaxinfer.__version__}"
    if run.get("commit") != checkout()[0]:
        return f"the run was made by commit {run.get('commit')}, this is {checkout()[0]}"
    return ""


@lru_cache(1)
def _machine() -> dict[str, object]:
    return {"platform": platform.platform(), "cores": os.cpu_count(), "cpu": cpu_name()}
