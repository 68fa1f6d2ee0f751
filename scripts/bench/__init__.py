"""Benchmarks of kernels, the engine, processes and the simulator."""
