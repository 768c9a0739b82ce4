"""Patches of other libraries: accelerate's optimizer wrapper, torch's clipping by value and DDP's broadcasts."""
