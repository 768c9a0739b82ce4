"""``hf-mp env``: the mixed precision that this machine supports, and a preset for it."""
