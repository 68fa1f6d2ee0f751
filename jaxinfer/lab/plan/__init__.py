"""Placements found by search: what stands where, for a goal, simulated by the serving code."""
