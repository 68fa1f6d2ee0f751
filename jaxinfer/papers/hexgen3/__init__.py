"""HexGen-3 (ICML 2026): pools for prefill, attention and FFN, which may be of unlike GPUs."""
