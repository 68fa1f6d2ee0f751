"""Aladdin: workers sized for their requests, and requests packed into them."""
