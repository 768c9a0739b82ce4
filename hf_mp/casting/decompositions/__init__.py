"""Ops whose C++ code calls listed ops, decomposed so that autocast sees those."""

AS_GIVEN = None  # a decomposition's answer where autocast casts nothing inside the op
