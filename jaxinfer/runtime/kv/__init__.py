"""Moves KV entries between instances: slabs, stage pairs and checks."""
