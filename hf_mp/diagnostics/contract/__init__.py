"""The precision contract: what a training stores, computes, sums and saves in which dtype, and what of it is risky.

``table`` is the contract as data and as text, ``watch`` takes it from tensors and from a step that runs. ``risks`` has
a function for each risky state, ``swamped`` counts the updates that rounding drops, ``folders`` reads checkpoints by
headers and samples, ``check`` finds the risks of a folder. torch is all that it needs.
"""
