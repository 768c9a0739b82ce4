"""``Transfers``: copies between slabs in host memory and two windows on a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_mp.weights.offload.host_memory import ALIGNED, padded
from hf_mp.weights.offload.streams import COMPUTE, INBOUND, OUTBOUND, Streams

WINDOW_BYTES = 2**28  # of each window, at most, if no single tensor needs more
_LEAST_BYTES = 2**20  # of each window, if WINDOW_BYTES allows it
_CHUNKS = 8  # at least: both windows together have at most a quarter of the copied bytes
ALIGNED_BYTES = 512  # a multiple of ALIGNED elements of each dtype, and of the alignment of CUDA's allocator


def window_bytes_for(moved_bytes: int) -> int:
    """Return the size of a window, if ``moved_bytes`` pass through both."""
    return min(WINDOW_BYTES, max(_LEAST_BYTES, moved_bytes // _CHUNKS))


class Transfers:
    """Two windows, and the order of all work that uses them or the slabs.

    Attributes:
        written: the event after which the copies of :meth:`write` are complete.
    """

    def __init__(self, device: torch.device, streams: Streams) -> None:
        self.streams, self.device, self.window_bytes = streams, device, 0
        self.windows: list[Tensor] = []  # bytes
        self.written: Any = None
        # Events of each window: copies to it are complete; all work that uses it is complete.
        self._filled: list[Any] = [None, None]
        self._free: list[Any] = [None, None]
        self._filling, self._used_bytes = 0, 0  # the window that write() fills, and its bytes in use

    def grow(self, window_bytes: int) -> None:
        """Make windows of at least ``window_bytes``."""
        if window_bytes > self.window_bytes:
            self.streams.synchronize()
            self.window_bytes = window_bytes
            self.windows.clear()  # before there are larger ones
            self.windows += [torch.empty(window_bytes, dtype=torch.uint8, device=self.device) for _ in range(2)]
            # Earlier work of the compute queue may still use this memory.
            self._free = [self.streams.record(COMPUTE)] * 2

    def stream(self, chunks: Sequence[Any], work: Callable[[Any], None]) -> None:
        """Copy each chunk into a window, run ``work`` on it there, and write it back; return when all is written.

        ``chunk.place(window)`` as :meth:`hf_mp.weights.offload.chunks.Chunk.place`.
        """
        streams, written_back = self.streams, []
        self._used_bytes = self.window_bytes  # write() has to wait for a window again
        streams.wait(INBOUND, self.written)

        def copy_in(number: int) -> None:
            window = number % 2
            slabs, inside, written = chunks[number].place(self.windows[window])
            written_back.append(_copying(slabs[:written], inside[:written]))
            streams.wait(INBOUND, self._free[window])
            streams.run(INBOUND, _copying(inside, slabs))
            self._filled[window] = streams.record(INBOUND)

        try:
            for number, chunk in enumerate(chunks):
                # One ahead, because the host may wait for the device in ``work``.
                for ahead in range(len(written_back), min(number + 2, len(chunks))):
                    copy_in(ahead)
                streams.wait(COMPUTE, self._filled[number % 2])
                streams.run(COMPUTE, partial(work, chunk))
                streams.wait(OUTBOUND, streams.record(COMPUTE))
                streams.run(OUTBOUND, written_back[number])
                self._free[number % 2] = streams.record(OUTBOUND)
        finally:
            # Other code (checkpoints, schedulers) reads the optimizer's state without waiting for a stream. On a GPU
            # this takes the time of the last copy.
            streams.synchronize()

    def write(self, source: Tensor, slabs: Sequence[Tensor], fill: Callable[..., None]) -> Any:
        """Copy ``source``, flat and on the device, to flat ``slabs``; it may be freed when this returns.

        ``fill(part, *inside)`` writes a part of ``source`` to a window. Returns the event for :meth:`read`.
        """
        streams = self.streams
        element_bytes = sum(slab.element_size() for slab in slabs)
        most_elements = (self.window_bytes - len(slabs) * ALIGNED_BYTES) // element_bytes // ALIGNED * ALIGNED
        for begin in range(0, source.numel(), most_elements):
            part = source[begin : begin + most_elements]
            inside = self._place(part.numel(), slabs)
            streams.run(COMPUTE, partial(fill, part, *inside))
            streams.wait(OUTBOUND, streams.record(COMPUTE))
            streams.run(OUTBOUND, _copying([slab[begin : begin + part.numel()] for slab in slabs], inside))
            self._free[self._filling] = self.written = streams.record(OUTBOUND)
        return self.written

    def _place(self, elements: int, slabs: Sequence[Tensor]) -> list[Tensor]:
        """Return parts of a window for ``elements`` of each dtype of ``slabs``."""
        sizes = [elements * slab.element_size() for slab in slabs]
        if self._used_bytes + sum(padded(size, ALIGNED_BYTES) for size in sizes) > self.window_bytes:
            self._filling, self._used_bytes = 1 - self._filling, 0
            self.streams.wait(COMPUTE, self._free[self._filling])
        inside = []
        for slab, size in zip(slabs, sizes, strict=True):
            begin, self._used_bytes = self._used_bytes, self._used_bytes + padded(size, ALIGNED_BYTES)
            inside.append(self.windows[self._filling][begin : begin + size].view(slab.dtype))
        return inside

    def read(self, targets: list[Tensor], slabs: list[Tensor], written: Any) -> None:
        """Copy ``slabs`` to ``targets`` on the device in the compute queue, after the event ``written``."""
        self.streams.wait(COMPUTE, written)
        self.streams.run(COMPUTE, _copying(targets, slabs))
        self.streams.enter()


def _copying(targets: list[Tensor], sources: list[Tensor]) -> Callable[[], None]:
    return partial(torch._foreach_copy_, targets, sources, non_blocking=True)
