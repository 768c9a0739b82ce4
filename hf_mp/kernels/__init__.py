"""Fused passes over many tensors, each with its plain-PyTorch reference beside it."""
