"""The precision contract: the dtypes in which a training stores, computes, reduces and saves, and their risks.

``table`` has the data and its text, ``record`` reads it from a running training. ``risks`` has a function for each
risky state. ``folders`` reads headers and samples of checkpoints, and ``check`` finds their risks.
"""
