"""What a user writes, and its checks."""
