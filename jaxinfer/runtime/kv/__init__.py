"""KV entries on their way between instances: slabs, stage pairs, checks."""
