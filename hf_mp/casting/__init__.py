"""Autocast: op tables, the mode that applies them, and what runs in place of an op."""
