"""Stages whose KV heads are on several devices."""
