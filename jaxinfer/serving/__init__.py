"""The scheduling core: plain Python, the same for the real and the simulated world.

Read the files in this order. Each answers one question:

1. ``loop.py``: what happens when a request arrives, a step ends or a transfer ends?
2. ``request_state.py``: what does the loop keep for each request?
3. ``views.py`` and ``system.py``: what can a system see, and what can it decide? ``hooks.py``
   checks its answers.
4. ``assignments.py``: how does a decision take effect?
5. ``instance.py``: which requests wait, run or are preempted? (``waiting.py``, ``running.py``)
6. ``batching.py``: what goes into the next step? ``batch_builder.py`` makes room for it, and
   ``admission.py`` decides which requests come in. ``policies.py`` finds policies by name.
7. ``kv_shards.py``: which request holds which pages? (``page_pool.py``, ``prefix_cache.py``)
8. ``transfer.py``: how does KV get from one instance to the next, and what frees it?
9. ``world.py``: what must a world provide? ``batch.py`` is what it receives.

Leave for later: ``features/`` (lost instances, slices of KV heads, half batches, and the grouped
decodes that make simulations fast), ``step_fit.py`` (for certain papers), ``releases.py`` (closed
loops).
"""
