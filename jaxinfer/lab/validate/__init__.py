"""Measured TTFT and TPOT of real engines, compared with the simulator's."""
