"""What a run tells of itself: metrics, tables, files."""
