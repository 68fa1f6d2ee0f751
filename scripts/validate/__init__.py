"""Compares the simulator with other simulators and engines, on their measurements."""
