"""Orders in which prefix caches evict pages, for both worlds; needs neither JAX nor numpy."""
