"""Faults of hand-offs, made on purpose, that the conformance check has to name."""
