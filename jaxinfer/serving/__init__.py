"""The serving loop and its policies: plain Python, the same for the real and simulated world."""
