"""Takeover: our own system, in which instances take over decodes from each other."""
