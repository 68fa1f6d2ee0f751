"""What layouts of a model on a mesh cost: bytes, collectives and seconds, before anything runs."""
