"""Machine code of numba's kernels, kept across processes.

numba's own cache does not recognise functions made by other functions, and would confuse their
symbols. Here, code is stored under a name, which describes everything that the kernel was made
with, and a digest of everything else. Each kernel has its own engine.
"""

import functools
import hashlib
import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import llvmlite
import numba as nb
import numpy as np
from llvmlite import binding, ir
from numba.core.registry import cpu_target
from numba.core.runtime import rtsys

from jaxinfer.files.kept import write_whole
from jaxinfer.files.made_from import digest_of

FOLDER = Path("~/.cache/jaxinfer/numba")
# Names of the stored files.
_KEPT = re.compile(r".+-[0-9a-f]{32}\.o")
# Files that no process has read for this long are removed; the time of reading is recorded once a
# day.
_OLD_S, _NOTED_S = 30 * 86400, 86400
# Without "arcp" and "reassoc": in vectors only, LLVM would estimate reciprocals and change the
# order of sums. Whether a loop uses vectors depends on the alignment of arrays.
FAST_MATH = {"nnan", "ninf", "nsz", "contract", "afn"}


class Code(NamedTuple):
    """A C function that exists as long as its engine."""

    address: int
    engine: Any


def compiled(
    name: str, signature: Any, function: Callable[..., Any], reassociates: bool = False
) -> Code:
    """Load a function's C code from the cache, or else compile the function and store its code.

    Args:
        name: must differ between all functions of the same sources.
        reassociates: whether LLVM may sum in any order, which vectorising sums requires.
    """
    # numba itself would use NUMBA_CACHE_DIR.
    folder = Path(os.environ.get("NUMBA_CACHE_DIR") or FOLDER)
    try:
        path = folder.expanduser() / f"{name}-{made_from()}.o"
    except RuntimeError:  # An arbitrary user of a container has no home directory.
        return _load(*_compile(signature, function, reassociates))
    found = _read(path)
    if found is None:
        found = _compile(signature, function, reassociates)
        _write(path, *found)
        _remove_old(path.parent)
    return _load(*found)


@functools.cache
def made_from() -> str:
    """Return a digest of all that names leave out: sources, versions, processor,
    numba's settings.
    """
    cpu = cpu_target.target_context.codegen().magic_tuple()
    return digest(Path(__file__).parent, cpu)


def digest(sources: Path, cpu: object) -> str:
    """Return a digest of the sources in a folder, for this processor."""
    versions = nb.__version__, llvmlite.__version__, np.__version__, sys.version
    settings = sorted(item for item in os.environ.items() if item[0].startswith("NUMBA_"))
    made = repr((digest_of(sources), cpu, versions, settings))
    return hashlib.sha256(made.encode()).hexdigest()[:32]


def _compile(signature: Any, function: Callable[..., Any], reassociates: bool) -> tuple[str, bytes]:
    """Compile a kernel; return its symbol and the object file."""
    flags = FAST_MATH | {"reassoc"} if reassociates else FAST_MATH
    made = nb.cfunc(signature, nopython=True, error_model="numpy", fastmath=flags)(function)
    _, _, (code, _) = made._library.serialize_using_object_code()
    return made.native_name, code


def assembled(symbol: str, module: ir.Module) -> Code:
    """Compile a function written in LLVM IR; this takes milliseconds, and nothing is stored."""
    module.triple = binding.get_default_triple()
    return _finished(symbol, _engine(str(module)))


def _load(symbol: str, code: bytes) -> Code:
    engine = _engine(f'target triple = "{binding.get_default_triple()}"')
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    return _finished(symbol, engine)


def _engine(assembly: str) -> Any:
    """Return a new engine for a module."""
    # Makes numba's own functions known to LLVM, as the first compilation would do.
    rtsys.initialize(cpu_target.target_context)
    target = binding.Target.from_default_triple()
    machine = target.create_target_machine(jit=True, codemodel="jitdefault")
    return binding.create_mcjit_compiler(binding.parse_assembly(assembly), machine)


def _finished(symbol: str, engine: Any) -> Code:
    engine.finalize_object()
    return Code(engine.get_function_address(symbol), engine)


def _read(path: Path) -> tuple[str, bytes] | None:
    """Read stored code; return None if it is missing or incomplete."""
    with suppress(OSError):
        kept = path.read_bytes()
        if time.time() - path.stat().st_mtime > _NOTED_S:
            with suppress(OSError):
                os.utime(path)
        checksum, content = kept[:32], kept[32:]
        if hashlib.sha256(content).digest() == checksum:
            symbol, _, code = content.partition(b"\0")
            return symbol.decode(), code
    return None


def _write(path: Path, symbol: str, code: bytes) -> None:
    """Store code completely or not at all; without space or rights, the next process compiles
    again.
    """
    content = symbol.encode() + b"\0" + code
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(path, hashlib.sha256(content).digest() + content)


@functools.cache
def _remove_old(folder: Path) -> None:
    """Remove code that no process has read for long; runs once per process."""
    with suppress(OSError):
        for path in folder.iterdir():
            with suppress(OSError):
                if _KEPT.fullmatch(path.name) and time.time() - path.stat().st_mtime > _OLD_S:
                    path.unlink()
