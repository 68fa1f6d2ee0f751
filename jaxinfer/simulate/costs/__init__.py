"""Models of step times, one file for each kind."""
