"""Stages whose KV heads lie on several devices."""
