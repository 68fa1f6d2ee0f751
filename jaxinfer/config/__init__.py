"""Checks and resolves the run files that users write."""
