"""Optimizer state, remainders and gradients of a lean layout in host memory; a training without it imports nothing."""
