"""Who gets which GPU: groups of unlike GPUs, their roles, and the flow of requests between them."""
