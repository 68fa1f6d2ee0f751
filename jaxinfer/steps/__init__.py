"""Steps in numbers: their buckets, their times, and profiles of these."""
