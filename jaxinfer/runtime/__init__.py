"""The real world: models compiled by JAX over device groups."""
