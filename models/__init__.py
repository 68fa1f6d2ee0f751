"""Model architectures in Flax NNX over paged KV caches. Imported as ``jaxinfer.models``."""
