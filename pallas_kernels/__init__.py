"""Paged attention. Imported as ``jaxinfer.pallas_kernels``.

Shape suffixes: T tokens, S sequences, C chunks, P pages, B tokens per page, M pages per sequence at
most, N query heads, K KV heads, G query heads per KV head, H head dim.
"""
