"""``WeightLayout``: stores the FP32 master weights and working copies of an attached model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hf_mp._warnings import warn_caller
from hf_mp.dtypes import LOWER_PRECISION_DTYPES
from hf_mp.model_index import model_parameters, optimizer_parameters, widen_buffers
from hf_mp.policy import PrecisionPolicy
from hf_mp.ranks.fsdp_communication import ScaleSource
from hf_mp.ranks.parallelism import Parallelism, is_dtensor
from hf_mp.weights.ddp_comm_hook import SplitGradientCommHook
from hf_mp.weights.working_copies import WorkingCopies


class WeightLayout:
    """Default layout, and base class of the others: the parameters are the FP32 masters.

    Working copies, in the policy's ``compute``, ``float16`` or ``bfloat16``, are cast once per update.
    """

    keeps_copies = True  # whether working copies are stored between uses
    keeps_scaled_gradients = False  # whether store_scaled_gradients() is implemented
    offload: str | None = None  # tensors in host memory: "optimizer" or "all"

    def __init__(self, policy: PrecisionPolicy) -> None:
        self.policy = policy
        self.copies = WorkingCopies(policy.compute)
        self._masters: set[int] = set()  # identities of the trained parameters of the last forward
        self._comm_hook_by_ddp: weakref.WeakKeyDictionary[nn.Module, SplitGradientCommHook] = (
            weakref.WeakKeyDictionary()
        )

    @torch.no_grad()
    def prepare_weights(self, model: nn.Module) -> None:
        """Cast 16-bit trainable parameters of ``model`` to FP32 masters, before a forward with grad."""
        trained = [parameter for parameter in model_parameters(model) if parameter.requires_grad]
        in_16_bits = [parameter for parameter in trained if parameter.dtype in LOWER_PRECISION_DTYPES]
        were_masters = any([id(parameter) in self._masters for parameter in in_16_bits])
        self._masters = set(map(id, trained))
        if not in_16_bits:
            return
        if were_masters:
            warn_caller(
                "the FP32 masters of an attached model were cast to 16 bits (model.half(), model.to(dtype)): they are "
                "FP32 again, and rounded. Leave the cast out, or call hf_mp.detach(model) first"
            )
        for parameter in in_16_bits:
            _to_fp32(parameter)
        widen_buffers(model)

    def working_copies(self, weights: Iterable[Tensor]) -> dict[int, Tensor]:
        """As :meth:`WorkingCopies.get_all`."""
        return self.copies.get_all(weights)

    def register_communication(
        self, model: nn.Module, parallelism: Parallelism, scale_source: ScaleSource, in_fp32: Sequence[nn.Module]
    ) -> None:
        """Register the communication of ``model``; weights of the modules ``in_fp32`` are sent in FP32."""
        ddp = parallelism.ddp
        needs_hook = self.keeps_scaled_gradients or self.policy.reduce_dtype is not torch.float32
        if needs_hook and ddp is not None and ddp not in self._comm_hook_by_ddp:
            self._comm_hook_by_ddp[ddp] = SplitGradientCommHook(ddp, self.policy, scale_source)

    def parameters_to_check(self, model: nn.Module | None, optimizers: Iterable[Optimizer]) -> list[nn.Parameter]:
        """Return the parameters that may have gradients after a backward of ``model``, each once."""
        return [] if model is None else model_parameters(model)

    def saving_for_backward(self) -> AbstractContextManager[None]:
        """Return a context for a forward, which may save other tensors than working copies."""
        return nullcontext()

    def store_scaled_gradients(
        self, weights: Mapping[int, Tensor], uses: dict[int, list[Tensor]], inverse: Tensor | None
    ) -> None:
        """Move gradients of ``weights`` out of ``uses`` and store them scaled; ``inverse`` unscales them.

        The keys of both are indices of an unscale node's inputs.
        """

    def gradients_and_factors(self, parameters: Iterable[nn.Parameter]) -> list[tuple[Tensor, Tensor | None]]:
        """Return the existing gradients, each with its FP32 unscale factor, or None for 1."""
        return [(gradient, None) for parameter in parameters if (gradient := parameter.grad) is not None]

    def clip_grad_norm(self, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor | None:
        """Clip gradients, and return their 2-norm before, FP32 of shape (); None to have torch clip them."""
        return None

    def wrap_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer to step from now on; a ValueError if it cannot update these masters."""
        return optimizer

    def refresh_working_copies(self, optimizer: Optimizer) -> None:
        """Called after an update by ``optimizer``."""
        self.copies.refresh_all(
            [parameter for parameter in optimizer_parameters(optimizer) if parameter.grad is not None]
        )

    def note_unseen_writes(self, parameters: Iterable[nn.Parameter]) -> None:
        """As :meth:`WorkingCopies.note_unseen_writes`."""
        self.copies.note_unseen_writes(parameters)

    def differ_from_copies(self, parameters: Iterable[nn.Parameter]) -> bool:
        """As :meth:`WorkingCopies.differ`."""
        return self.copies.differ(parameters)

    def refresh(self) -> None:
        self.copies.refresh()

    def freeze_scale_factors(self, parameters: Callable[[], Iterable[nn.Parameter]]) -> None:
        """Copy the factors of gradients that are still scaled, before the loss scale changes."""

    def restore(self, model: nn.Module | None) -> None:
        """Restore ordinary FP32 parameters, and release working copies."""
        self.copies.clear()
        self._masters.clear()


def _to_fp32(parameter: nn.Parameter) -> None:
    """Cast ``parameter`` in place."""
    if not is_dtensor(parameter):
        parameter.data = parameter.data.float()
        return
    in_fp32 = nn.Parameter(parameter.detach().float())  # setting `.data` of a DTensor does not change its shard
    vars(in_fp32).update(vars(parameter))
    torch.utils.swap_tensors(parameter, in_fp32)
