"""Whether a compiler, a transform or a checkpoint is at work, so that only differentiable torch ops may be used.

Functions that torch.compile traces.
"""

from __future__ import annotations

import torch


def is_compiling_or_transforming() -> bool:
    """Whether only differentiable torch ops may be used: torch.compile decides itself what it saves for backward, and
    torch.func's transforms take neither saved-tensor hooks nor autograd functions of the ordinary form."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def is_saving_elsewhere() -> bool:
    """Whether a checkpoint or an offload takes what autograd saves."""
    # saved_tensors_hooks can be set by a public class, but not asked for.
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
