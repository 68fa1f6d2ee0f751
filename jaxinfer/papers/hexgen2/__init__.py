"""HexGen-2: groups of unlike GPUs, their roles, and the flow of requests between them."""
