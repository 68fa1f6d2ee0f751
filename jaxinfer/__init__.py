"""LLM inference in JAX over device groups that differ."""

from typing import TYPE_CHECKING, Any

from jaxinfer.errors import JaxinferError
from jaxinfer.request import CompletionOutput, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from jaxinfer.llm import LLM

__all__ = ["LLM", "CompletionOutput", "JaxinferError", "RequestOutput", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """Import ``LLM``, and with it JAX, when it is first asked for."""
    if name == "LLM":
        from jaxinfer.llm import LLM

        return LLM
    raise AttributeError(f"module 'jaxinfer' has no attribute {name!r}")
