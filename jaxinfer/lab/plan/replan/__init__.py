"""Placements that change over time: a trace in windows, and a placement for each."""
