"""Ops whose C++ code calls listed ops, decomposed so that autocast sees those."""
