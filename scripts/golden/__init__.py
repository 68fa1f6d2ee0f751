"""Makers of files that the repository keeps: golden outputs, a trace, the demo model."""
