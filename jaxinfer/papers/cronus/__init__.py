"""Cronus: splits prompts between a weak group and a strong one."""
