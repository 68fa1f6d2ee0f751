"""Programs that make files of the repository: golden outputs, a trace, the demo model."""
