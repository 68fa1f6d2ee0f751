"""Measurements of steps, attention, operators and transfers."""
