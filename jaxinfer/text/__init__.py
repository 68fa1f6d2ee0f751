"""Converts between text and tokens."""
