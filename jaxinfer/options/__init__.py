"""Option sets that users write, their checks, and classes chosen by name."""
