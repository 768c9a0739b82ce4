"""The recorder: a dispatch mode that records when each storage, real or fake, is allocated and freed."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_mp.dtypes import LOWER_PRECISION_DTYPES
from hf_mp.kernels.nested import tensors_in
from hf_mp.memory.footprint import Kind, gradients_of, tensors_of
from hf_mp.memory.ledger import Category, Ledger, Phase
from hf_mp.ranks.parallelism import local_parts
from hf_mp.weights.fp32_reads import as_stored

_CATEGORIES = {
    Kind.MASTER_WEIGHTS: Category.MASTER_WEIGHTS,
    Kind.GRADIENT: Category.GRADIENTS,
    Kind.QUANTIZATION_STATE: Category.FROZEN_WEIGHTS,
}

# CUDA's caching allocator rounds every request up to a block, and takes memory for those from 10 MiB on in pieces of
# 2 MiB, of which it leaves a rest of up to 1 MiB to the request.
_CUDA_BLOCK_BYTES, _CUDA_PIECE_BYTES = 512, 2**21
_CUDA_OF_ITS_OWN_BYTES, _CUDA_MOST_REST_BYTES = 10 * 2**20, 2**20


@dataclass
class CopiedBytes:
    """What was copied between host and device since the count began."""

    inbound: int = 0  # to the device
    outbound: int = 0


class MemoryRecorder(TorchDispatchMode):
    """Keeps a :class:`Ledger` of the storages on one device while it is active.

    Like ``torch.distributed._tools.mem_tracker.MemTracker``, it sees what torch's ops return, real or fake, and not the
    workspace of a kernel.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.device = device
        self._on_gpu = device.type in ("cuda", "meta")  # meta stands for one
        # Not by their addresses: that of a parameter which is gone becomes another tensor's.
        self._parameters: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._in_head = False
        self._followed: list[nn.Parameter] = []
        # Memory of the host that a fake GPU cannot tell from its own, and the bytes copied from and to it.
        self._on_host: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._makes_host_memory = False
        self.copied = CopiedBytes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with as_stored():  # whatever read a split parameter in FP32 has done so before it came here
            result = func(*args, **(kwargs or {}))
        if self._makes_host_memory:
            return result
        if self._on_host and func is torch.ops.aten._foreach_copy_.default:
            self._count_copies(*args[:2])
        for tensor in self._here(tensors_in(result)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.ledger.live:
                self._add(storage, self._category(tensor, func, args), str(func))
        return result

    def make_host_memory(self, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros that do not count as memory of the device, in the place of memory that offload takes of the host."""
        self._makes_host_memory = True
        try:
            memory = torch.zeros(elements, dtype=dtype, device=self.device)
        finally:
            self._makes_host_memory = False
        self._on_host.add(memory.untyped_storage())
        return memory

    def _count_copies(self, targets: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
        for target, source in zip(targets, sources, strict=True):
            is_outbound, is_inbound = (one.untyped_storage() in self._on_host for one in (target, source))
            self.copied.outbound += target.nbytes * is_outbound
            self.copied.inbound += source.nbytes * is_inbound

    def _add(self, storage: torch.UntypedStorage, category: Category, op: str = "") -> None:
        # torch keeps one Python object for each storage, which goes with its memory.
        weakref.finalize(storage, self.ledger.free, storage._cdata).atexit = False
        self._allocate(storage, category, op)

    def _allocate(self, storage: torch.UntypedStorage, category: Category, op: str) -> None:
        size_bytes = _on_cuda(storage.nbytes()) if self._on_gpu else storage.nbytes()
        self.ledger.allocate(storage._cdata, size_bytes, category, op)

    def _category(self, tensor: Tensor, func: Any, args: Any) -> Category:
        """The category of a tensor that the op ``func`` has just allocated."""
        phase = self.ledger.phase
        # Nothing is trained yet: batches and masks.
        if phase is Phase.SETUP:
            return Category.INPUTS_AND_BUFFERS
        is_rounding = func is torch.ops.aten._to_copy.default and tensor.dtype in LOWER_PRECISION_DTYPES
        if is_rounding and args[0].untyped_storage() in self._parameters:
            return Category.WORKING_COPIES
        if phase is Phase.UPDATE:
            return Category.TEMPORARIES
        if self._in_head:
            return Category.LOGITS_AND_LOSS
        # In backward, only gradient checkpointing computes with grad enabled.
        recomputed = phase is Phase.BACKWARD and torch.is_grad_enabled()
        return Category.ACTIVATIONS if phase is Phase.FORWARD or recomputed else Category.TEMPORARIES

    def take(self, tensors: Iterable[Tensor], category: Category) -> None:
        """Set the category of tensors, also of those older than the recorder."""
        for tensor in self._here(tensors):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.ledger.live:
                self._add(storage, category)
            self.ledger.live[storage._cdata].category = category

    def start_phase(self, phase: Phase) -> None:
        self.ledger.phase = phase
        # Not in hooks of the parameters: those of the lean layouts treat gradients that are looked at in another way.
        for parameter in self._followed:
            self.take(gradients_of(parameter), Category.GRADIENTS)
        if phase is not Phase.BACKWARD:  # backward begins with the loss, where forward ended
            self._in_head = False

    @torch.no_grad()
    def _here(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """The parts of ``tensors`` on this process's device; of a collective under way, what it writes into."""
        parts: list[Any] = local_parts(tensors)
        held = [part.elem if type(part).__name__ == "AsyncCollectiveTensor" else part for part in parts]
        found = [part for part in held if part.device.type == self.device.type]
        return [part for part in found if part.untyped_storage() not in self._on_host] if self._on_host else found

    @contextlib.contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        """Categorize the gradients, weights and logits of ``model``."""
        for _, kind, tensor in tensors_of(model):
            category = _CATEGORIES.get(kind, Category.INPUTS_AND_BUFFERS)
            if isinstance(tensor, nn.Parameter):
                self._parameters.update(part.untyped_storage() for part in self._here([tensor]))
                category = Category.FROZEN_WEIGHTS
                if tensor.requires_grad:
                    is_copy = tensor.dtype in LOWER_PRECISION_DTYPES
                    category = Category.WORKING_COPIES if is_copy else Category.MASTER_WEIGHTS
            self.take([tensor], category)
        self._followed = list(model.parameters())
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size_bytes: int) -> Any:
            result = resize(storage, size_bytes)
            if storage._cdata in self.ledger.live:
                self.ledger.free(storage._cdata)
                self._allocate(storage, Category.WORKING_COPIES, "all-gather")
            return result

        # A model without a head has the hook on a module that nobody calls.
        head = getattr(model, "get_output_embeddings", nn.Identity)() or nn.Identity()
        # FSDP2 gives up a gathered weight's memory, and takes it again, by resizing its storage, which is no op.
        with (
            head.register_forward_pre_hook(self._enter_head),
            mock.patch.object(torch.UntypedStorage, "resize_", resized),
        ):
            yield

    def _enter_head(self, head: nn.Module, args: Any) -> None:
        self._in_head = True
        for value in args:
            if isinstance(value, Tensor) and value.requires_grad:
                # Backward leaves the head when the gradient of what went in is there.
                value.register_hook(self._leave_head)

    def _leave_head(self, gradient: Tensor) -> None:
        self._in_head = False


def _on_cuda(size_bytes: int) -> int:
    """What CUDA's caching allocator counts for a request, where no larger memory that was freed serves it."""
    blocks, pieces = (-(-size_bytes // unit) * unit for unit in (_CUDA_BLOCK_BYTES, _CUDA_PIECE_BYTES))
    return pieces if blocks >= _CUDA_OF_ITS_OWN_BYTES and pieces - blocks <= _CUDA_MOST_REST_BYTES else blocks
