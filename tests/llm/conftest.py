"""Fixtures of what runs leave behind."""

from typing import Any

import pytest

from jaxinfer.runtime import run as real_run
from jaxinfer.runtime.world import RealWorld
from jaxinfer.serving.request_state import RequestState


@pytest.fixture
def worlds(monkeypatch: pytest.MonkeyPatch) -> list[RealWorld]:
    """The worlds of all runs from here on."""
    made: list[RealWorld] = []

    def make(*args: Any) -> RealWorld:
        made.append(RealWorld(*args))
        return made[-1]

    monkeypatch.setattr(real_run, "RealWorld", make)
    return made


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The addresses of the requests that were made from here on and are still known to somebody.

    Asking gc.get_objects would give a reference to what other threads are still building.
    """
    known: set[int] = set()
    make = RequestState.__init__

    def note(request: RequestState, *args: Any, **options: Any) -> None:
        known.add(id(request))
        make(request, *args, **options)

    def forget(request: RequestState) -> None:
        known.discard(id(request))

    monkeypatch.setattr(RequestState, "__init__", note)
    monkeypatch.setattr(RequestState, "__del__", forget, raising=False)
    return known
