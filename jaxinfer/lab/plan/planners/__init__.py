"""Planners: each lists, or walks through, the candidates of one kind of cluster."""
