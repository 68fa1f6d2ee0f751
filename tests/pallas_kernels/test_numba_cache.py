"""Compiled kernels that are kept: for the next process, and for nobody whose code is another."""

import ctypes
import os
import pwd
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba")
import llvmlite
import numba
from numba import types

from jaxinfer.pallas_kernels import numba_cache, xla_call

ONE_WORD = types.int64(types.int64)


class Cache:
    """A folder of its own; ``compiles`` counts."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.compiles = folder, 0
        monkeypatch.setenv("NUMBA_CACHE_DIR", str(folder))
        compile = numba_cache._compile

        def counted(*args: Any) -> Any:
            self.compiles += 1
            return compile(*args)

        monkeypatch.setattr(numba_cache, "_compile", counted)

    def adds(self, amount: int) -> int:
        """40 and the amount, by a kernel that was made with it."""

        def add(x: int) -> int:
            return x + amount

        code = numba_cache.compiled(f"add_{amount}", ONE_WORD, add)
        return int(ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(code.address)(40))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    return Cache(tmp_path / "kept", monkeypatch)


def test_each_is_compiled_once_and_none_is_taken_for_another(cache: Cache) -> None:
    """Symbols are the same but for a number that each process counts anew."""
    assert [cache.adds(amount) for amount in (2, 3, 2, 3, 2)] == [42, 43, 42, 43, 42]
    assert cache.compiles == 2
    assert oct(cache.folder.stat().st_mode & 0o777) == "0o700"


@pytest.mark.parametrize("damage", ["cut", "changed", "empty"])
def test_what_is_damaged_is_compiled_again(cache: Cache, damage: str) -> None:
    assert cache.adds(2) == 42
    (path,) = cache.folder.iterdir()
    whole = path.read_bytes()
    changed = bytes([*whole[:-9], whole[-9] ^ 1, *whole[-8:]])
    path.write_bytes({"cut": whole[:-100], "changed": changed, "empty": b""}[damage])
    assert [cache.adds(2), cache.adds(2)] == [42, 42]
    assert cache.compiles == 2


def test_without_a_place_to_keep_it(cache: Cache) -> None:
    cache.folder.write_text("a file")
    assert [cache.adds(2), cache.adds(2)] == [42, 42]
    assert cache.compiles == 2


def test_without_a_home_it_is_compiled_each_time(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container's arbitrary user, who is not in its list, has no home."""

    def unknown(number: int) -> None:
        raise KeyError(number)

    monkeypatch.delenv("NUMBA_CACHE_DIR")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert [cache.adds(2), cache.adds(2)] == [42, 42]
    assert cache.compiles == 2


def test_what_nobody_has_read_for_long_goes(cache: Cache) -> None:
    """Files go after 31 days unless read since; and nothing goes that was not kept here."""
    assert [cache.adds(2), cache.adds(3)] == [42, 43]
    numba_cache._remove_old.cache_clear()  # The next process.
    kept = {path.name.partition("-")[0]: path for path in cache.folder.iterdir()}
    others = [cache.folder / name for name in ("numba.nbi", "mine.o")]
    for path in others:
        path.write_text("")
    for path in (*kept.values(), *others):
        os.utime(path, (time.time() - 31 * 86400,) * 2)
    assert cache.adds(3) == 43
    assert cache.compiles == 2, "what is old is good until it goes"
    assert cache.adds(4) == 44
    left = {path.name.partition("-")[0] for path in cache.folder.iterdir()}
    assert left == {"add_3", "add_4", "numba.nbi", "mine.o"}


def test_other_sources_and_another_processor_are_another_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = tmp_path / "kernel.py"
    kernel.write_text("a")
    before = numba_cache.digest(tmp_path, ("x86_64", "znver4", "+avx512f"))
    assert before == numba_cache.digest(tmp_path, ("x86_64", "znver4", "+avx512f"))
    assert before != numba_cache.digest(tmp_path, ("x86_64", "znver4", ""))
    assert before != numba_cache.digest(tmp_path, ("x86_64", "znver3", "+avx512f"))
    kernel.write_text("b")
    assert before != numba_cache.digest(tmp_path, ("x86_64", "znver4", "+avx512f"))
    kernel.write_text("a")
    monkeypatch.setenv("NUMBA_OPT", "1")
    assert before != numba_cache.digest(tmp_path, ("x86_64", "znver4", "+avx512f"))


def test_threads_that_trace_at_once_compile_the_task_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Code that another thread had made, too, would be freed while kernels call it."""
    made: list[str] = []

    def compile_slowly(name: str, *what: object) -> numba_cache.Code:
        made.append(name)
        time.sleep(0.05)
        return numba_cache.Code(1 << 12, object())

    monkeypatch.setattr(xla_call, "compiled", compile_slowly)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(xla_call._task_target, ["jaxinfer_task_of_a_test"] * 4))
    assert made == ["jaxinfer_task_of_a_test"]
    assert all(target is found[0] for target in found)


SCRIPT = """
import sys
import jax.numpy as jnp, numpy as np
from jaxinfer.pallas_kernels import numba_cache, numba_matmul
compile, count = numba_cache._compile, []
numba_cache._compile = lambda *args: count.append(1) or compile(*args)
a = np.arange(24, dtype=np.float32).reshape(3, 8)
b = np.arange(160, dtype=np.float32).reshape(8, 20)
assert np.array_equal(numba_matmul.matmul(jnp.asarray(a), jnp.asarray(b)), a @ b)
print(len(count))
"""


@pytest.mark.slow
def test_the_next_process_compiles_nothing(tmp_path: Path) -> None:
    """A kernel's entry knows its work and the handler, and that the task, by their names."""
    there = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    counts = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT], env=there, check=True, capture_output=True, text=True
        ).stdout.strip()
        for _ in range(2)
    ]
    assert counts == ["3", "0"]


def test_what_cannot_be_kept_leaves_nothing_else(cache: Cache) -> None:
    assert cache.adds(2) == 42
    (path,) = cache.folder.iterdir()
    path.unlink()
    path.mkdir()
    assert cache.adds(2) == 42
    assert list(cache.folder.iterdir()) == [path]


@pytest.mark.parametrize(
    ("module", "name"),
    [(numba, "__version__"), (llvmlite, "__version__"), (np, "__version__"), (sys, "version")],
)
def test_other_versions_are_another_entry(
    module: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = numba_cache.made_from.__wrapped__()
    assert before == numba_cache.made_from.__wrapped__()
    monkeypatch.setattr(module, name, "another")
    assert before != numba_cache.made_from.__wrapped__()


def test_all_sources_beside_it_make_the_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names do not matter: the pool of threads is in a file of another name."""
    monkeypatch.setattr(numba_cache, "__file__", str(tmp_path / "numba_cache.py"))
    found = {numba_cache.made_from.__wrapped__()}
    for name in ("numba_cpu.py", "xla_call.py"):
        for text in ("a", "b"):
            (tmp_path / name).write_text(text)
            found.add(numba_cache.made_from.__wrapped__())
    assert len(found) == 5
