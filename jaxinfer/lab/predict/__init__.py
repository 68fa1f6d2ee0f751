"""Lengths of answers, learned from a model's own: a classifier, and what it has to beat."""
