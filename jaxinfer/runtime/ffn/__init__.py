"""Stages whose layers' FFN, or experts, are on another group (attention-FFN disaggregation)."""
