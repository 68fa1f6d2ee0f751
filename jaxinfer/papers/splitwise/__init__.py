"""Splitwise: pools of machines for prompts and for decodes."""
