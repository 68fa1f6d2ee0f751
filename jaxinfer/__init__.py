"""LLM inference in JAX over groups of unlike devices."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxinfer.errors import JaxinferError
    from jaxinfer.llm import LLM
    from jaxinfer.report.frames import load_run
    from jaxinfer.request import CompletionOutput, RequestOutput, SamplingParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CompletionOutput",
    "JaxinferError",
    "RequestOutput",
    "SamplingParams",
    "__version__",
    "load_run",
]

_HOMES = {
    "LLM": "llm",
    "CompletionOutput": "request",
    "JaxinferError": "errors",
    "RequestOutput": "request",
    "SamplingParams": "request",
    "load_run": "report.frames",
}


def __getattr__(name: str) -> Any:
    """Import a name on first use, because ``LLM`` imports JAX."""
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxinfer' has no attribute {name!r}")
    return getattr(import_module(f"jaxinfer.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
