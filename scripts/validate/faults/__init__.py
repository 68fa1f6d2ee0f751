"""Deliberate faults of hand-offs, which the conformance check must name."""
