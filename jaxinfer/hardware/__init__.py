"""GPUs, models and links as numbers, and the data behind efficiency figures."""
