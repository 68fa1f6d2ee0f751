"""Lowers and compiles the kernels for GPUs on machines without a GPU."""
