"""``MemoryRecorder``: allocations and frees of storages, real or fake."""

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

# CUDA's caching allocator rounds requests up to 512 bytes. From 10 MiB on it reserves multiples of 2 MiB, and does not
# split off a remainder of up to 1 MiB.
_CUDA_BLOCK_BYTES, _CUDA_SEGMENT_BYTES = 512, 2**21
_CUDA_OWN_SEGMENT_BYTES, _CUDA_MAX_REMAINDER_BYTES = 10 * 2**20, 2**20


@dataclass
class CopiedBytes:
    inbound: int = 0  # to the device
    outbound: int = 0


class MemoryRecorder(TorchDispatchMode):
    """Records the storages that ops return on one device in a :class:`Ledger`, without workspaces of kernels.

    ``torch.distributed._tools.mem_tracker.MemTracker`` works the same way.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.device = device
        self._on_gpu = device.type in ("cuda", "meta")  # meta replaces a GPU
        # Weak references: addresses are reused.
        self._parameters: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._in_head = False
        self._followed: list[nn.Parameter] = []
        # Host memory of offload, on the meta device as well.
        self._on_host: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._makes_host_memory = False
        self.copied = CopiedBytes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with as_stored():  # FP32 reads of split parameters happen before dispatch
            result = func(*args, **(kwargs or {}))
        if self._makes_host_memory:
            return result
        if self._on_host and func is torch.ops.aten._foreach_copy_.default:
            self._count_copies(*args[:2])
        for tensor in self._local_parts(tensors_in(result)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.ledger.live:
                self._add(storage, self._category(tensor, func, args), str(func))
        return result

    def make_host_memory(self, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate zeros that are not recorded, instead of host memory."""
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
        # A storage has one Python object, with the lifetime of its memory.
        weakref.finalize(storage, self.ledger.free, storage._cdata).atexit = False
        self._allocate(storage, category, op)

    def _allocate(self, storage: torch.UntypedStorage, category: Category, op: str) -> None:
        size_bytes = _on_cuda(storage.nbytes()) if self._on_gpu else storage.nbytes()
        self.ledger.allocate(storage._cdata, size_bytes, category, op)

    def _category(self, tensor: Tensor, func: Any, args: Any) -> Category:
        phase = self.ledger.phase
        if phase is Phase.SETUP:  # batches and masks
            return Category.INPUTS_AND_BUFFERS
        is_rounding = func is torch.ops.aten._to_copy.default and tensor.dtype in LOWER_PRECISION_DTYPES
        if is_rounding and args[0].untyped_storage() in self._parameters:
            return Category.WORKING_COPIES
        if phase is Phase.UPDATE:
            return Category.TEMPORARIES
        if self._in_head:
            return Category.LOGITS_AND_LOSS
        is_recomputation = phase is Phase.BACKWARD and torch.is_grad_enabled()  # of gradient checkpointing
        return Category.ACTIVATIONS if phase is Phase.FORWARD or is_recomputation else Category.TEMPORARIES

    def take(self, tensors: Iterable[Tensor], category: Category) -> None:
        """Set the category of tensors, in the ledger or new."""
        for tensor in self._local_parts(tensors):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.ledger.live:
                self._add(storage, category)
            self.ledger.live[storage._cdata].category = category

    def start_phase(self, phase: Phase) -> None:
        """Set the phase of later allocations, and the category of all gradients."""
        self.ledger.phase = phase
        # Hooks would change how lean layouts store gradients.
        for parameter in self._followed:
            self.take(gradients_of(parameter), Category.GRADIENTS)
        if phase is not Phase.BACKWARD:  # backward begins in the head
            self._in_head = False

    @torch.no_grad()
    def _local_parts(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        parts: list[Any] = local_parts(tensors)
        # Outputs of collectives are wrapped.
        plain = [part.elem if type(part).__name__ == "AsyncCollectiveTensor" else part for part in parts]
        on_device = [part for part in plain if part.device.type == self.device.type]
        if not self._on_host:
            return on_device
        return [part for part in on_device if part.untyped_storage() not in self._on_host]

    @contextlib.contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        """Categorize weights, gradients and logits of ``model``, and record FSDP2's gathered weights."""
        self._categorize(model)
        self._followed = list(model.parameters())
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size_bytes: int) -> Any:
            result = resize(storage, size_bytes)
            if storage._cdata in self.ledger.live:
                self.ledger.free(storage._cdata)
                self._allocate(storage, Category.WORKING_COPIES, "all-gather")
            return result

        # Without a head, register the hook on an unused module.
        head = getattr(model, "get_output_embeddings", nn.Identity)() or nn.Identity()
        # FSDP2 resizes the storages of gathered weights, which is no op.
        with (
            head.register_forward_pre_hook(self._enter_head),
            mock.patch.object(torch.UntypedStorage, "resize_", resized),
        ):
            yield

    def _categorize(self, model: nn.Module) -> None:
        """Set the categories of tensors, and record the storages of parameters."""
        for _, kind, tensor in tensors_of(model):
            category = _CATEGORIES.get(kind, Category.INPUTS_AND_BUFFERS)
            if isinstance(tensor, nn.Parameter):
                self._parameters.update(part.untyped_storage() for part in self._local_parts([tensor]))
                category = Category.FROZEN_WEIGHTS
                if tensor.requires_grad:
                    is_copy = tensor.dtype in LOWER_PRECISION_DTYPES
                    category = Category.WORKING_COPIES if is_copy else Category.MASTER_WEIGHTS
            self.take([tensor], category)

    def _enter_head(self, head: nn.Module, args: Any) -> None:
        self._in_head = True
        for value in args:
            if isinstance(value, Tensor) and value.requires_grad:
                # When backward leaves the head.
                value.register_hook(self._leave_head)

    def _leave_head(self, gradient: Tensor) -> None:
        self._in_head = False


def _on_cuda(size_bytes: int) -> int:
    """Return the bytes that CUDA's caching allocator uses for a request."""
    rounded, segment = (-(-size_bytes // unit) * unit for unit in (_CUDA_BLOCK_BYTES, _CUDA_SEGMENT_BYTES))
    uses_segment = rounded >= _CUDA_OWN_SEGMENT_BYTES and segment - rounded <= _CUDA_MAX_REMAINDER_BYTES
    return segment if uses_segment else rounded
