"""The simulated world: virtual time, GPU specs, links and cost models."""
