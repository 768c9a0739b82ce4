"""What other code asks torch about autocast, answered for ours.

Models carve FP32 islands out of autocast (``with torch.autocast(device, enabled=False)``: rotary embeddings, routers)
and choose dtypes by ``torch.is_autocast_enabled`` and ``torch.get_autocast_dtype``. Inside our autocast all these speak
of ours; outside of it they are torch's own. Installed once, when autocast is first imported, because torch.compile
traces code that enters autocast and cannot trace the patching of a module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.utils.checkpoint as torch_checkpoint


class ActiveAutocast(Protocol):
    """What is asked of the innermost autocast."""

    dtype: torch.dtype
    enabled: bool

    def island(self) -> AbstractContextManager[Any]:
        """An autocast inside this one that is switched off."""


is_torch_autocast_enabled = torch.is_autocast_enabled  # torch's own answer, whatever is patched below


def install(active: Callable[[], ActiveAutocast | None], hidden: Callable[[], AbstractContextManager[None]]) -> None:
    """Let torch's questions about autocast be answered for ours.

    Args:
        active: the innermost autocast of the calling thread, or None.
        hidden: a context in which ``active`` returns None.
    """
    torch_dtype = torch.get_autocast_dtype
    enter, leave = torch.autocast.__enter__, torch.autocast.__exit__

    @functools.wraps(is_torch_autocast_enabled)
    def is_autocast_enabled(*args: Any, **kwargs: Any) -> bool:
        ours = active()
        return is_torch_autocast_enabled(*args, **kwargs) if ours is None else ours.enabled

    @functools.wraps(torch_dtype)
    def get_autocast_dtype(*args: Any, **kwargs: Any) -> torch.dtype:
        ours = active()
        return torch_dtype(*args, **kwargs) if ours is None else ours.dtype

    def enter_autocast(self: Any) -> Any:
        ours = active()
        if ours is None:
            return enter(self)
        if self._enabled:
            raise RuntimeError(
                "torch.autocast was entered inside hf_mp.autocast, and the two would cast each other's results: use "
                "hf_mp.autocast for both, or torch.autocast(..., enabled=False) for an FP32 island"
            )
        island = ours.island()
        self.__dict__.setdefault("_hf_mp_islands", []).append(island)
        return island.__enter__()

    def leave_autocast(self: Any, *exc_info: Any) -> Any:
        islands = self.__dict__.get("_hf_mp_islands")
        return islands.pop().__exit__(*exc_info) if islands else leave(self, *exc_info)

    torch.is_autocast_enabled = is_autocast_enabled
    torch.get_autocast_dtype = get_autocast_dtype
    torch.autocast.__enter__ = functools.wraps(enter)(enter_autocast)  # type: ignore[method-assign]
    torch.autocast.__exit__ = functools.wraps(leave)(leave_autocast)  # type: ignore[method-assign]

    # Checkpointing keeps torch.autocast's own state for the recomputation; ours is entered there by our own means.
    autocast_kwargs = torch_checkpoint._get_autocast_kwargs

    @functools.wraps(autocast_kwargs)
    def get_autocast_kwargs(*args: Any, **kwargs: Any) -> Any:
        with hidden():
            return autocast_kwargs(*args, **kwargs)

    torch_checkpoint._get_autocast_kwargs = get_autocast_kwargs
