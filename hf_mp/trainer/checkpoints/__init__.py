"""Checkpoints of a training: complete or marked as unfinished, and verified before loading."""
