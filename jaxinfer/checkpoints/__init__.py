"""Checkpoints of all formats: found, opened, converted."""
