"""Batches and placement on Ray (the extra ``ray``); imported only if a run file asks for it."""

from jaxinfer.ray.generator import Generator

__all__ = ["Generator"]
