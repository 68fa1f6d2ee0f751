"""A ledger of the loop's decisions, kept by one observer in both worlds; see docs/proof.md."""
