"""Hetis: KV heads on several devices, chosen for each request."""
