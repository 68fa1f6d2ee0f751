"""Finds, opens and converts checkpoints of all formats."""
