"""Inputs and outputs: batch files, bench workloads, traces."""
