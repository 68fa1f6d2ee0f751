"""An instance's compiled programs: layout, inputs, step, sampler, KV cache."""
