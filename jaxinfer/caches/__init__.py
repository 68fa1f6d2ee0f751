"""Orders in which prefix caches evict pages, the same in both worlds; no JAX, no numpy."""
