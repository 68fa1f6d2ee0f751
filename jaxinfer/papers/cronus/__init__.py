"""Cronus: prompts split between a weak group and a strong one."""
