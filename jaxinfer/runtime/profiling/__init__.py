"""Measures steps, attention, operators and transfers."""
