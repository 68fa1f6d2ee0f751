"""DistServe: prefill and decode on instances of their own, placed for goodput."""
