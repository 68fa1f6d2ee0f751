"""Reproductions of papers and studies: ``python -m scripts.reproduce PAPER --data DIR``."""
