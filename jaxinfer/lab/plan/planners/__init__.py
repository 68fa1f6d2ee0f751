"""Planners: each searches the candidates of one kind of cluster."""
