"""Compares the simulator's TTFT and TPOT with those measured on real engines."""
