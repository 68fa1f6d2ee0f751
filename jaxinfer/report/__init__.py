"""Reports of a run: metrics, tables, files."""
