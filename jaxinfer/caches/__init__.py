"""Orders in which prefix caches evict pages, in real and simulated runs; needs no JAX or numpy."""
