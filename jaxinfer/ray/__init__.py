"""What needs Ray, the extra ``ray``; nothing else of jaxinfer imports it."""

from jaxinfer.ray.generator import Generator

__all__ = ["Generator"]
