"""Pieces of a model that are replaced while mixed precision is attached."""
