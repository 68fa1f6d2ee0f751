"""Inputs and outputs: batch files, workloads for measurements, traces."""
