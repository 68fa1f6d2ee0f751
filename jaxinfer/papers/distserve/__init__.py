"""DistServe: prefill and decode on separate instances, placed for goodput."""
