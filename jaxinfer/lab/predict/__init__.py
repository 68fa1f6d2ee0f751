"""Predicts lengths of answers with a classifier trained on a model's own answers."""
