"""Our loop beside vLLM's own scheduler, decision by decision (docs/results/vllm_scheduler.md)."""
