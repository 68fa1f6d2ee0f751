"""A short file per system: the policy of one paper."""
