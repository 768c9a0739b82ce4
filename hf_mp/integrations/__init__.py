"""Patches of other libraries: accelerate, and torch's clipping by value."""
