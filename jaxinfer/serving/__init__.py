"""The scheduling core: plain Python, the same for the real and the simulated world.

Read the files in this order. Each answers one question:

1. ``loop.py``: what happens when a request arrives, a step ends or a transfer ends?
2. ``request_state.py``: what does the loop know about a request?
3. ``system.py``: what can a system see, and what can it decide? ``hooks.py`` checks its answers.
4. ``assignments.py``: how does a decision take effect? ``features/losses.py``: and if an
   instance is lost?
5. ``instance.py``: who waits, who runs, and who is preempted? (``waiting.py``, ``running.py``)
6. ``batching.py``: what goes into the next step? ``batch_builder.py`` makes room for it, and
   ``admission.py`` decides who comes in. ``policies.py`` finds policies by their names.
7. ``kv_shards.py``: who holds which pages? (``page_pool.py``, ``prefix_cache.py``)
8. ``transfer.py``: how does KV get from one instance to the next, and who frees it?
9. ``world.py``: what must a world provide? ``batch.py`` is what it is given.

Leave for later: ``features/`` (what only some runs use), ``step_fit.py`` (for certain papers) and
``releases.py`` (closed loops).
"""
