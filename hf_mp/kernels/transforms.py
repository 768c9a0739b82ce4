"""Checks for torch.compile, torch.func transforms and checkpoints. torch.compile traces these functions."""

from __future__ import annotations

import torch


def is_compiling_or_transforming() -> bool:
    """Return whether only differentiable torch ops may be used.

    torch.compile chooses the tensors to save, and torch.func supports neither saved-tensor hooks nor autograd functions
    without ``setup_context``.
    """
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def is_saving_elsewhere() -> bool:
    """Return whether saved-tensor hooks, of a checkpoint or an offload, are active."""
    # torch has no public API to read them.
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
