"""General systems, and the registry of all systems by name."""
