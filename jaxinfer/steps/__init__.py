"""Steps as numbers: their buckets, how long they take, and profiles of that."""
