"""Costs of a model's layouts on a mesh: bytes, collectives and seconds, before anything runs."""
