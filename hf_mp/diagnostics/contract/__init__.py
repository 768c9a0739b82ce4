"""The precision contract: the dtypes in which a training stores, computes, reduces and saves, and their risks.

``table`` contains the data and its text. ``record`` reads the contract from a running training. ``risks`` has a
function for each risky state, and ``lost_update_count`` counts updates that rounding drops. ``folders`` reads headers
and samples of checkpoints, and ``check`` finds the risks of a folder. The package needs only torch.
"""
