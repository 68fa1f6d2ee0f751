"""Hetis: KV heads on several devices, chosen request by request."""
