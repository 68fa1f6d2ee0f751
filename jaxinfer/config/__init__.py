"""Run files as users write them, and their checks."""
