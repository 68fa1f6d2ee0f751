"""GPUs, models and links as numbers, and the figures that runs are measured by."""
