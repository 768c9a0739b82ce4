"""``WeightLayout``: where the FP32 master weights of an attached model are, and what its forward reads."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hf_mp._warnings import warn_caller
from hf_mp.dtypes import LOWER_PRECISION_DTYPES
from hf_mp.model_walk import model_parameters, optimizer_parameters, widen_buffers
from hf_mp.policy import PrecisionPolicy
from hf_mp.ranks.parallelism import Parallelism, is_dtensor
from hf_mp.ranks.wire import ScaleSource
from hf_mp.weights.buckets import SplitGradientCommHook
from hf_mp.weights.working_copies import WorkingCopies


class WeightLayout:
    """How the weights of one model are stored while mixed precision is attached: FP32 masters with working copies.

    The model's parameters are the FP32 masters; lower-precision ops read working copies, cast once per update to the
    policy's ``compute``, ``float16`` or ``bfloat16``.
    """

    keeps_copies = True  # whether a working copy outlives its use
    keeps_scaled_gradients = False  # whether to ask store_scaled_gradients()
    offload: str | None = None  # what is in host memory: "optimizer" or "all"

    def __init__(self, policy: PrecisionPolicy) -> None:
        self.policy = policy
        self.copies = WorkingCopies(policy.compute)
        self._masters: set[int] = set()  # the trained parameters at the last forward, by identity
        self._comm_hook_by_ddp: weakref.WeakKeyDictionary[nn.Module, SplitGradientCommHook] = (
            weakref.WeakKeyDictionary()
        )

    @torch.no_grad()
    def prepare_weights(self, model: nn.Module) -> None:
        """Before a forward with grad: give trainable parameters of ``model`` FP32 masters where they have none."""
        trained = [parameter for parameter in model_parameters(model) if parameter.requires_grad]
        narrow = [parameter for parameter in trained if parameter.dtype in LOWER_PRECISION_DTYPES]
        before, self._masters = self._masters, set(map(id, trained))
        if not narrow:
            return
        if any([id(parameter) in before for parameter in narrow]):
            warn_caller(
                "the FP32 masters of an attached model were cast to 16 bits (model.half(), model.to(dtype)): they are "
                "FP32 again, and rounded. Leave the cast out, or call hf_mp.detach(model) first"
            )
        for parameter in narrow:
            _to_fp32(parameter)
        widen_buffers(model)

    def working_copies(self, weights: Iterable[Tensor]) -> dict[int, Tensor]:
        """By the identity of FP32 masters among ``weights``, what products read in their places, without grad."""
        return self.copies.get_all(weights)

    def register_communication(
        self, model: nn.Module, parallelism: Parallelism, scale_source: ScaleSource, in_fp32: Sequence[nn.Module]
    ) -> None:
        """Take over the communication of ``model``; weights of the modules ``in_fp32`` are not rounded."""
        ddp, has_buckets = parallelism.ddp, self.keeps_scaled_gradients or self.policy.reduce_dtype is not torch.float32
        # Once for each DDP, of one process too: its first forward is the last moment before a bucket is reduced.
        if has_buckets and ddp is not None and ddp not in self._comm_hook_by_ddp:
            self._comm_hook_by_ddp[ddp] = SplitGradientCommHook(ddp, self.policy, scale_source)

    def parameters_to_check(self, model: nn.Module | None, optimizers: Iterable[Optimizer]) -> list[nn.Parameter]:
        """The parameters whose gradients a backward of ``model`` may leave, each once."""
        return [] if model is None else model_parameters(model)

    def saving_for_backward(self) -> AbstractContextManager[None]:
        """A context to run a forward in, which decides what autograd saves of the working copies."""
        return nullcontext()

    def store_scaled_gradients(
        self, weights: Mapping[int, Tensor], uses: dict[int, list[Tensor]], inverse: Tensor | None
    ) -> None:
        """Move gradients of ``weights`` out of ``uses``, both by place, and keep them scaled by 1/``inverse``."""

    def gradients_and_factors(self, parameters: Iterable[nn.Parameter]) -> list[tuple[Tensor, Tensor | None]]:
        """The existing gradients, as backward left them, each with the FP32 factor that unscales it (None for 1)."""
        return [(gradient, None) for parameter in parameters if (gradient := parameter.grad) is not None]

    def clip_grad_norm(self, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor | None:
        """Clip gradients that only this layout can read; returns their 2-norm before clipping, FP32 of shape ().

        None: torch can clip them, and nothing is done.
        """
        return None

    def wrap_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """The optimizer to step from now on; a ValueError for one that cannot update these masters."""
        return optimizer

    def refresh_working_copies(self, optimizer: Optimizer) -> None:
        """Refresh the working copies of the masters that ``optimizer`` has written."""
        self.copies.refresh_all(
            [parameter for parameter in optimizer_parameters(optimizer) if parameter.grad is not None]
        )

    def note_unseen_writes(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take in that the masters ``parameters`` may have been written by code that leaves no trace."""
        self.copies.note_unseen_writes(parameters)

    def differ_from_copies(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether a master has another value than its working copy; True if no copy of ``parameters`` is kept."""
        return self.copies.differ(parameters)

    def refresh(self) -> None:
        """Round all masters that have working copies again."""
        self.copies.refresh()

    def freeze_scale_factors(self, parameters: Callable[[], Iterable[nn.Parameter]]) -> None:
        """Called before the loss scale changes: gradients that are still scaled keep the scale that they have."""

    def restore(self, model: nn.Module | None) -> None:
        """Leave ordinary FP32 parameters, and no copy."""
        self.copies.clear()
        self._masters.clear()


def _to_fp32(parameter: nn.Parameter) -> None:
    if not is_dtensor(parameter):
        # The Parameter stays: optimizers, tied modules and hooks hold it.
        parameter.data = parameter.data.float()
        return
    whole = nn.Parameter(parameter.detach().float())  # `.data` of a DTensor leaves its shard as it is
    vars(whole).update(vars(parameter))
    torch.utils.swap_tensors(parameter, whole)
