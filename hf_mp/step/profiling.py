"""Names for the parts of a step in torch's profiler, and through ``emit_nvtx`` in NVIDIA's."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.autograd import profiler

from hf_mp.casting.compile_exclusion import uncompiled

_NOTHING = nullcontext()


@uncompiled  # code that is compiled anew for a profiler would be timed with its compilation
def profiled(part: str) -> AbstractContextManager[Any]:
    """Context of one ``part`` of a step, which a running profiler shows as ``hf_mp: part``."""
    return profiler.record_function(f"hf_mp: {part}") if profiler._is_profiler_enabled else _NOTHING
