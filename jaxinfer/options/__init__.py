"""Sets of options that a user writes, their checks, and classes chosen by name."""
