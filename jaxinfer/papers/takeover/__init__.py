"""Takeover: our own system, in which instances take decodes over from each other."""
