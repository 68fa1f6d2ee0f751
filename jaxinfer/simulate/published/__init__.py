"""Operators as NVIDIA's aiconfigurator publishes them, read as they lie."""
