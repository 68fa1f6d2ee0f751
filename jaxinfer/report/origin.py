"""Records a run's origin: its inputs, code, machine and time."""

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
# Files that simulations and drawn lengths use besides the run file; none belongs to a user.
FACTS = (SHIPPED / "gpus.yaml", SHIPPED / "models.yaml")
_LENGTHS = SHIPPED / "lengths.yaml"


def asked_for(
    config: RunFile, work: Iterable[BenchRequest] | None = None, facts: Iterable[Path] = ()
) -> dict[str, Any]:
    """Return a run's inputs, as JSON values of ``run.json`` from which the run can be repeated.

    Args:
        work: the requests, if they come from ``config``'s workload (a trace or random lengths).
        facts: shipped files that affect the result, in addition to those that ``config`` names.
    """
    data = config.model_dump(mode="json", exclude_unset=True)
    workload = config.workload.model_dump(mode="json", exclude_none=True)
    if work is not None:
        workload["requests"], workload["sha256"] = digest(work)
    if config.workload.synthetic:
        facts = [*facts, _LENGTHS]
    return {"run_file": data, "workload": workload, "files": files_of(data, facts)}


def digest(work: Iterable[BenchRequest]) -> tuple[int, str]:
    """Return the number of requests, and the SHA-256 of their contents."""
    count, found = 0, hashlib.sha256()
    for item in work:
        found.update(repr(item).encode())
        count += 1
    return count, found.hexdigest()


def files_of(run_file: dict[str, Any], facts: Iterable[Path] = ()) -> dict[str, str]:
    """Return the SHA-256 of each file that a run file names, except batches and weights.

    Args:
        run_file: contents of the run file.
        facts: shipped files that affect the result, too.
    """
    if str(run_file.get("model")).endswith(".gguf"):
        run_file = run_file | {"model": None}
    if workload := run_file.get("workload"):
        run_file = run_file | {"workload": workload | {"input": None, "output": None}}
    found = contents([run_file, *map(str, facts)], False)
    return {_shown(path): sha256 for path, sha256 in found.items()}


def recorded_path(name: str) -> Path:
    """Return the path of a file that ``files_of`` names; ``facts`` are always the shipped files."""
    facts = {_shown(str(fact)): fact for fact in (*FACTS, _LENGTHS)}
    return facts.get(name) or data_path(name)


def _shown(path: str) -> str:
    """Return a path for the record.

    Shipped files have a name that does not depend on the machine.
    """
    inside = Path(path).is_relative_to(SHIPPED)
    return f"configs/{Path(path).relative_to(SHIPPED).as_posix()}" if inside else path


def origin() -> dict[str, object]:
    """Return command, versions, machine and time, as JSON values of ``run.json``."""
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
    """Return the command that started this process, ready to paste into a shell."""
    program, *arguments = sys.argv or [""]
    path = Path(program)
    name = path.parent.name if path.name == "__main__.py" else path.name
    return shlex.join([name or "python", *arguments])


@lru_cache(1)
def versions() -> dict[str, str | None]:
    """Return versions of this package and the others that matter; None if not installed."""
    return {"jaxinfer": jaxinfer.__version__} | {name: version_of(name) for name in PACKAGES}


@lru_cache(1)
def checkout() -> tuple[str | None, bool | None]:
    """Return the commit of this code, and whether it was changed; None for an installed wheel."""
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
    """Return the version or commit that made a run; empty if it is the present one."""
    version = (run.get("versions") or {}).get("jaxinfer")
    if version != jaxinfer.__version__:
        return f"the run was made by version {version}, this is {jaxinfer.__version__}"
    if run.get("commit") != checkout()[0]:
        return f"the run was made by commit {run.get('commit')}, this is {checkout()[0]}"
    return ""


@lru_cache(1)
def _machine() -> dict[str, object]:
    return {"platform": platform.platform(), "cores": os.cpu_count(), "cpu": cpu_name()}
