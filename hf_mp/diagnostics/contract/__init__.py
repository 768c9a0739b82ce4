"""The precision contract: what a training stores, computes, sums and saves in which dtype, and what of it is risky.

``table`` is the contract as data and as text, ``watch`` takes it from tensors and from a step that runs. ``risks`` has
a function for each risky state, ``folders`` reads checkpoints by headers and samples, ``check`` puts both together.
torch is all that it needs.
"""
