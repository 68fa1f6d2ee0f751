"""Lowers and compiles the kernels for GPUs without a GPU."""
