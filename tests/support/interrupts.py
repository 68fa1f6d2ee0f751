"""Interrupts, as of Ctrl-C, between any two instructions of some code of ours."""

import dis
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import jaxinfer

ROOT = os.path.dirname(jaxinfer.__file__)
# Instructions that change what others see.
STORES = ("STORE_ATTR", "STORE_SUBSCR", "DELETE_SUBSCR", "RETURN_VALUE")


class Interrupt(BaseException):
    """Stands for KeyboardInterrupt, which pytest would take for its own."""


# A piece of code, and an instruction in it that is about to be run.
Point = tuple[CodeType, int]


@contextmanager
def followed(hear: Callable[[Point], None], *modules: str) -> Iterator[None]:
    """Tell of each instruction that this thread runs in some modules, whose paths begin so."""
    paths = tuple(os.path.join(ROOT, module) for module in modules)

    def follow(frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode":
            hear((frame.f_code, frame.f_lasti))
        return follow

    def enter(frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(paths):
            return None
        frame.f_trace_opcodes = True
        return follow

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(before)


def points(run: Callable[[], object], *modules: str) -> list[Point]:
    """Instructions that change something, of all that a run comes to, each once."""
    found: dict[Point, None] = {}
    with followed(lambda point: found.setdefault(point), *modules):
        run()
    stores: dict[CodeType, set[int]] = {}
    for code in {code for code, _ in found}:
        stores[code] = {i.offset for i in dis.get_instructions(code) if i.opname in STORES}
    return [(code, at) for code, at in found if at in stores[code]]


@contextmanager
def interrupted_at(point: Point, *modules: str) -> Iterator[None]:
    """Raise Interrupt as this thread comes to an instruction for the first time."""

    def strike(here: Point) -> None:
        if here == point:
            raise Interrupt

    with followed(strike, *modules):
        yield
