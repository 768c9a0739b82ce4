"""Our own autocast: op tables, the mode that applies them, FP16 products on a CPU, working copies."""

from hf_mp.autocasting.mode import active_autocast, autocast
from hf_mp.autocasting.working_copies import WorkingCopies

__all__ = ["WorkingCopies", "active_autocast", "autocast"]
