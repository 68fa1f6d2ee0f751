"""A ledger of what the loop decided, kept by one observer in both worlds; docs/proof.md."""
