"""Measured TTFT and TPOT of real engines, beside the simulator's."""
