"""Grids over run files, which are simulated or run, with tables and pictures."""
