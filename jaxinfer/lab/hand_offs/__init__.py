"""Hand-offs between real engines, checked by golden KV."""
