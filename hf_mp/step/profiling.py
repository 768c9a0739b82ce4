"""Names for the parts of a step in torch's profiler, and through ``emit_nvtx`` in NVIDIA's."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.autograd import profiler

from hf_mp.casting.compile_exclusion import uncompiled

_NOTHING = nullcontext()


@uncompiled  # otherwise torch.compile recompiles when a profiler starts, and the profile contains it
def profiled(part: str) -> AbstractContextManager[Any]:
    """Return a context manager that labels one ``part`` of a step as ``hf_mp: part`` if a profiler runs."""
    return profiler.record_function(f"hf_mp: {part}") if profiler._is_profiler_enabled else _NOTHING
