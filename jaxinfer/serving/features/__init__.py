"""Features that only some runs use; ``serving/`` enters each of them by one call.

- ``decode_group``: decodes that a simulation advances together.
- ``half_batches``: steps computed as two halves in turn.
- ``head_slices``, ``slice_moves``: slices of KV heads on several devices, and moving them.
- ``losses``: instances that are lost, that return, or that continue without some shards.
"""
