"""How much memory the tensors of a training take at once."""

from __future__ import annotations

import gc
import json
import os
import tempfile
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def peak_tensor_bytes(training: Callable[[], Any], device: torch.device) -> int:
    """Bytes of the tensors that are alive at once, at most, of those that ``training`` makes.

    On a CPU, torch's profiler counts them; what a library allocates inside an op is not among them.
    """
    gc.collect()  # what an earlier training has left would be freed in this one
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        training()
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or it prints a line when it starts and when it stops
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        training()
    with tempfile.TemporaryDirectory() as directory:
        trace = Path(directory, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    # Not its own running total: that still holds what was freed when no profiler looked.
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]")
    return max(accumulate((size for _, size in changes), initial=0))
