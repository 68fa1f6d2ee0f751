"""Lowers and compiles the attention kernels without a GPU."""
