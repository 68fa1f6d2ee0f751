"""Measured times of the operators of a model's steps, as tables for simulations."""
