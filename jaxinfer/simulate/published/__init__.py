"""Reads operators in the form in which NVIDIA's aiconfigurator publishes them."""
