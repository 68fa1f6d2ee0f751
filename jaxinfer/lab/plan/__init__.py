"""Searches for the best placement for a goal, with simulations by the serving code."""
