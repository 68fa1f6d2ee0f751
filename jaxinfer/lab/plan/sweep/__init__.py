"""Grids over run files, simulated or run, with tables and pictures."""
