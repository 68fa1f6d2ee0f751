"""Placements that change over time: divides a trace into windows, and finds one for each."""
