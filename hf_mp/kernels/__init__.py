"""Fused passes over many tensors, each with a PyTorch reference."""
