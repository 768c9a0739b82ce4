"""Checkpoints that survive kills, full disks and flipped bits, and that cannot run code when they are loaded."""
