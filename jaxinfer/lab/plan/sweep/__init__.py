"""Grids over run files, simulated or run, with their tables and pictures."""
