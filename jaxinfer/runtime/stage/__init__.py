"""An instance's compiled programs: layout, inputs, step, sampler and KV cache."""
