"""Fused passes over many tensors, each with its PyTorch reference."""
