"""Features that only some runs use; the files of ``serving/`` enter each by one call.

- ``decode_group``: decodes that a simulation advances together.
- ``half_batches``: steps computed as two halves in turn.
- ``head_slices``, ``slice_moves``: slices of KV heads on several devices, and their moves.
- ``losses``: instances that are lost, that return, or that go on without some shards.
"""
