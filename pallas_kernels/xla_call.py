"""Lets XLA call functions compiled by numba: the call frame of its FFI, and its threads.

A call's work is divided into units. The calling thread takes one after the other, and so do tasks
on XLA's own thread pool, as many as get a thread; the call does not wait for tasks that have not
begun. Waking a thread takes longer than many calls, so a thread that has helped spins for the next
call.
"""

import ctypes
import functools
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numba as nb
import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from jaxinfer.errors import one_line
from jaxinfer.pallas_kernels.numba_cache import Code, assembled, compiled

I64 = ir.IntType(64)
S = TypeVar("S")
# Makes a part of a kernel, which is inlined; compiled separately, it would take as long again.
part = nb.njit(inline="always")
# Words of 8 bytes in XLA_FFI_CallFrame, XLA_FFI_Buffer and XLA_FFI_Api (c_api.h).
EXTENSION, API, CONTEXT, ARGS, RETS = 1, 2, 3, 9, 14
DATA, DIMS = 3, 5
SCHEDULE = 17
# Words in XLA_FFI_Extension_Base, whose kind is 1 if XLA asks for our version, and in _Metadata.
KIND, METADATA, VERSION = 1, 3, 3
# Minor versions of 0.x with these words: jax 0.10.2 has 3, 0.12 has 5.
KNOWN, PARTS = range(3, 6), ("MAJOR", "MINOR")

# Words of the data that the threads of one call share.
NEXT, DONE, TOTAL, WORKERS, USERS, OUR_ARGS, OUR_RETS, WORK, ASK = range(9)
# After them, the words of the request to the thread pool.
ASK_WORDS = 5
SHARED_WORDS = ASK + ASK_WORDS
# The worker that only counts the units.
COUNT = -1
# Number of places where threads watch for the next call. Each is a cache line whose first word is
# its state: free, taken by a thread, or the call that this thread must help. Then: how often a
# thread looks, which takes some tens of microseconds.
PLACES, LINE, FREE, TAKEN, LOOKS = 16, 64, 0, 1, 50_000
_places = np.zeros(PLACES * LINE // 8, np.int64)
binding.add_symbol("jaxinfer_places", _places.ctypes.data)


class NativeCode(NamedTuple):
    """Code that others call by its name; it is freed with this object."""

    name: str
    code: tuple[Code, ...]


def compiled_once(make: Callable[[S], NativeCode]) -> Callable[[S], NativeCode]:
    """Return a function that compiles a kernel once per size, even if several threads trace."""
    lock, kept = threading.Lock(), functools.cache(make)

    def target(sizes: S) -> NativeCode:
        with lock:
            return kept(sizes)

    return target


def ffi_version() -> tuple[int, int]:
    """Read the major and minor version of XLA's FFI from jaxlib's header.

    Raises:
        OSError: the header cannot be read.
        ValueError: the header does not define the version.
    """
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h")
    text = header.read_text()
    parts = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in PARTS]
    major, minor = (int(found[1]) if found else -1 for found in parts)
    if min(major, minor) < 0:
        raise ValueError(f"{header} does not define XLA_FFI_API_MAJOR and XLA_FFI_API_MINOR")
    return major, minor


def why_not() -> str | None:
    """Return why XLA's call frames are not supported here, or None."""
    try:
        major, minor = ffi_version()
    except (OSError, ValueError) as error:
        return f"the version of XLA's FFI is not known: {one_line(error)}"
    if major == 0 and minor in KNOWN:
        return None
    return f"XLA's FFI is version {major}.{minor}, known are 0.{KNOWN[0]} to 0.{KNOWN[-1]}"


@intrinsic
def pointer(typingctx: Any, address: Any, like: Any) -> Any:
    """Return an address as a typed pointer for ``carray``; ``like`` has the element type."""
    target = types.CPointer(like)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(target))

    return target(address, like), codegen


@intrinsic
def _fetch_add(typingctx: Any, address: Any, amount: Any) -> Any:
    """Add to a word that other threads also change; return its old value."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = builder.inttoptr(args[0], I64.as_pointer())
        return builder.atomic_rmw("add", at, args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def _read(typingctx: Any, address: Any) -> Any:
    """Read a word that other threads write."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = builder.inttoptr(args[0], I64.as_pointer())
        return builder.load_atomic(at, "seq_cst", 8)

    return types.int64(types.int64), codegen


@intrinsic
def _replace(typingctx: Any, address: Any, old: Any, new: Any) -> Any:
    """Replace a word if it has the old value; return whether it did."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = builder.inttoptr(args[0], I64.as_pointer())
        found = builder.cmpxchg(at, args[1], args[2], "seq_cst", "seq_cst")
        return builder.extract_value(found, 1)

    return types.boolean(types.int64, types.int64, types.int64), codegen


@intrinsic
def _call(typingctx: Any, function: Any, arguments: Any) -> Any:
    """Call a C function of these words that returns a word."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        words = cgutils.unpack_tuple(builder, args[1])
        kind = ir.FunctionType(I64, [I64] * len(words)).as_pointer()
        return builder.call(builder.inttoptr(args[0], kind), words)

    return types.int64(types.int64, types.UniTuple(types.int64, len(arguments))), codegen


@nb.njit
def words(address: int) -> Any:
    """Return the memory from an address on, as an array of 8-byte words."""
    return nb.carray(pointer(address, np.int64(0)), 1 << 40)


@nb.njit
def data(buffers: int, i: int) -> int:
    """Return the address of a buffer's first element."""
    return words(words(buffers)[i])[DATA]


@nb.njit
def dim(buffers: int, i: int, axis: int) -> int:
    """Return a buffer's size along an axis."""
    return words(words(words(buffers)[i])[DIMS])[axis]


@nb.njit
def take(shared: int) -> int:
    """Claim the next unit and return its number; a number past the last means that none is left."""
    return _fetch_add(shared + 8 * NEXT, 1)


@nb.njit
def take_after(shared: int) -> int:
    """Mark a unit as done, and claim the next one."""
    _fetch_add(shared + 8 * DONE, 1)
    return take(shared)


@nb.njit
def is_past(shared: int, unit: int) -> bool:
    """Tell whether nothing is left to do, so that the call may end and free its buffers."""
    return unit >= words(shared)[TOTAL]


def address_of(function: str) -> Any:
    """Return an intrinsic for the address of a C function, which code refers to by name.

    A number would differ in the next process.
    """

    @intrinsic
    def found(typingctx: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kind = ir.FunctionType(I64, [I64])
            there = cgutils.get_or_insert_function(builder.module, kind, function)
            return builder.ptrtoint(there, I64)

        return types.int64(), codegen

    return found


_malloc, _free, _places_at = map(address_of, ("malloc", "free", "jaxinfer_places"))


@nb.njit
def _leave(shared: int) -> None:
    """Leave the call; the last one frees what was shared."""
    if _fetch_add(shared + 8 * USERS, -1) == 1:
        _call(_free(), (shared,))


@nb.njit
def _schedule(frame: int, task: int, shared: int) -> int:
    """Submit a task to XLA's thread pool; returns 0, or an error."""
    ask = words(shared + 8 * ASK)
    ask[0], ask[1], ask[2], ask[3], ask[4] = 8 * ASK_WORDS, 0, words(frame)[CONTEXT], task, shared
    return _call(words(words(frame)[API])[SCHEDULE], (shared + 8 * ASK,))


@nb.njit
def _work(shared: int, worker: int, unit: int) -> None:
    """Let a worker do a unit, and all others that are not taken."""
    common = words(shared)
    _call(common[WORK], (common[OUR_ARGS], common[OUR_RETS], worker, shared, unit))


@nb.njit
def _next_call() -> int:
    """Spin for the next call for a while; return 0 if none comes."""
    for i in range(PLACES):
        place = _places_at() + LINE * i
        if _replace(place, FREE, TAKEN):
            for _ in range(LOOKS):
                if _read(place) != TAKEN:
                    break
            if _replace(place, TAKEN, FREE):
                return 0
            shared = _read(place)
            _replace(place, shared, FREE)
            return shared
    return 0


@nb.njit
def _ask_those_who_look_out(shared: int, wanted: int) -> int:
    """Let spinning threads help, as many as wanted; return how many are missing."""
    for i in range(PLACES):
        place = _places_at() + LINE * i
        if wanted > 0 and _read(place) == TAKEN:
            _fetch_add(shared + 8 * USERS, 1)
            if _replace(place, TAKEN, shared):
                wanted -= 1
            else:
                _fetch_add(shared + 8 * USERS, -1)
    return wanted


def _task(shared: int) -> None:
    """Do a pool thread's part in calls of any kernels."""
    while shared != 0:
        unit = take(shared)
        # A task that comes late must not look at the call's buffers.
        late = is_past(shared, unit)
        if not late:
            _work(shared, _fetch_add(shared + 8 * WORKERS, 1), unit)
        _leave(shared)
        # A late task has no core of its own.
        shared = 0 if late else _next_call()


@compiled_once
def _task_target(name: str) -> NativeCode:
    """Compile the common task of all kernels once: a second copy could be freed while it runs."""
    code = compiled(name, types.void(types.int64), _task)
    binding.add_symbol(name, code.address)
    return NativeCode(name, (code,))


@compiled_once
def _handler_target(name: str) -> NativeCode:
    """Compile the function that XLA calls for all kernels; each kernel's entry passes its own work.

    It is ``handler(frame, scratch, work)``, with the number of the scratch result and the address
    of the kernel's ``work``.
    """
    version = np.int64(ffi_version()[1] << 32)
    task_address = address_of(_task_target("jaxinfer_task").name)

    def handler(frame: int, scratch: int, work: int) -> int:
        extension = words(frame)[EXTENSION]
        if extension != 0 and (words(extension)[KIND] & 0xFFFFFFFF) == 1:
            words(words(extension)[METADATA])[VERSION] = version
            return 0
        args, rets = words(frame)[ARGS], words(frame)[RETS]
        total = _call(work, (args, rets, COUNT, 0, 0))
        workers = min(dim(rets, scratch, 0), total)
        shared = _call(_malloc(), (8 * SHARED_WORDS,))
        common = words(shared)
        common[NEXT], common[DONE], common[TOTAL] = 1, 0, total
        common[WORKERS], common[USERS] = 1, 1
        common[OUR_ARGS], common[OUR_RETS], common[WORK] = args, rets, work
        error = 0
        for _ in range(_ask_those_who_look_out(shared, workers - 1)):
            _fetch_add(shared + 8 * USERS, 1)
            error = _schedule(frame, task_address(), shared)
            if error != 0:
                _fetch_add(shared + 8 * USERS, -1)
                break
        _work(shared, 0, 0)
        while _fetch_add(shared + 8 * DONE, 0) < total:
            pass
        _leave(shared)
        return error

    code = compiled(f"{name}-{ffi_version()[1]}", types.int64(*[types.int64] * 3), handler)
    binding.add_symbol(name, code.address)
    return NativeCode(name, (code,))


def register_target(
    name: str,
    work: Callable[[int, int, int, int, int], int],
    scratch: int = 1,
    reassociates: bool = False,
) -> "NativeCode":
    """Register a kernel with XLA, which passes it the addresses of the lists of its buffers.

    Args:
        name: identifies everything that ``work`` was made with.
        work: called with the lists of arguments and results, the worker's number, ``shared`` and a
            first unit. It does that unit, if there is one, and then those that
            ``take_after(shared)`` returns, in increasing order. It reads no buffer after a unit
            that ``is_past`` the last one, and returns 0. For the worker ``COUNT`` it only returns
            the number of units.
        scratch: number of a result that is scratch memory, with a row for each worker.
        reassociates: see ``compiled``.
    """
    name = f"jaxinfer_{name}"
    # Called by address, because an inlined function would be compiled for each of its callers.
    code = compiled(f"{name}-work", types.int64(*[types.int64] * 5), work, reassociates)
    binding.add_symbol(f"{name}_work", code.address)
    entry = assembled(name, _entry(name, _handler_target("jaxinfer_handler").name, scratch))
    capsule = jax.ffi.pycapsule(ctypes.c_void_p(entry.address))
    jax.ffi.register_ffi_target(name, capsule, platform="cpu")
    return NativeCode(name, (entry, code))


def _entry(name: str, handler: str, scratch: int) -> ir.Module:
    """Return a kernel's own function, which XLA calls with a frame: the handler with its work."""
    module = ir.Module()
    handle = ir.Function(module, ir.FunctionType(I64, [I64] * 3), handler)
    work = ir.Function(module, ir.FunctionType(I64, [I64] * 5), f"{name}_work")
    entry = ir.Function(module, ir.FunctionType(I64, [I64]), name)
    builder = ir.IRBuilder(entry.append_basic_block())
    address = builder.ptrtoint(work, I64)
    builder.ret(builder.call(handle, (entry.args[0], ir.Constant(I64, scratch), address)))
    return module


def threads() -> int:
    """Return how many threads may work on a call: the processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
