"""``MixedPrecision``: attaches a precision policy to a model and an optimizer, and detaches it again."""

from __future__ import annotations

import inspect
import math
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, get_args

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer

from hf_mp.casting.replacements.activations import class_forward, install_activations, remove_activations
from hf_mp.casting.replacements.causal_lm_loss import install_causal_lm_loss, remove_causal_lm_loss
from hf_mp.casting.rules import Rules
from hf_mp.casting.tables import TableName
from hf_mp.kernels.gradient_scan import SQUARES_BELOW, all_finite
from hf_mp.policy import LOWER_PRECISION_DTYPES, PrecisionPolicy
from hf_mp.scaling.scalers import LossScaleError, LossScaler, ScaleTensors, StepReport, headroom_left, make_loss_scaler
from hf_mp.step.borders import check_reachable, input_border, output_border
from hf_mp.step.forward import AttachedForward
from hf_mp.step.gradients import Measured, largest_true_magnitude, measure
from hf_mp.step.region import Region
from hf_mp.step.update import StepGuard
from hf_mp.weights.distributed import Ranks, check_parallelism, is_dtensor, is_running, is_sharded, local_part
from hf_mp.weights.early_state import state_to_fp32
from hf_mp.weights.fused_adamw import step_whole
from hf_mp.weights.optimizer import MasterWeightOptimizer
from hf_mp.weights.optimizer_in_backward import FreeGradients, OptimizerInBackward
from hf_mp.weights.split_layout import restore_parameters, split_trainable_parameters
from hf_mp.weights.split_parameter import (
    keep_scale_of_gradients,
    raw_gradients,
)
from hf_mp.weights.working_copies import WorkingCopies

DEFERRED_ELEMENTS = 2**20  # outputs from this size on are cast to FP32 only when they are read


@dataclass(frozen=True)
class PrecisionStats:
    """What mixed precision did so far in this process.

    Attributes:
        steps: optimizer steps, skipped ones included.
        skipped_steps: of those, the ones skipped for an overflow.
        loss_scale: the loss scale in force; 1.0 where nothing is scaled.
        loss_scale_first: the loss scale of the first step.
        loss_scale_min: the smallest that a step used.
        loss_scale_max: the largest that a step used.
        headroom: doublings that the scale could still take at the last clean step; None where not measured.
    """

    steps: int = 0
    skipped_steps: int = 0
    loss_scale: float = 1.0
    loss_scale_first: float = 1.0
    loss_scale_min: float = 1.0
    loss_scale_max: float = 1.0
    headroom: float | None = None

    def log_entries(self) -> dict[str, float]:
        """The entries for a training log: ``loss_scale``, ``skipped_steps`` and, where measured, ``headroom``."""
        entries = {"loss_scale": self.loss_scale, "skipped_steps": self.skipped_steps}
        return entries if self.headroom is None else {**entries, "headroom": round(self.headroom, 2)}

    @classmethod
    def before_first_step(cls, scale: float) -> PrecisionStats:
        """The stats of a run that starts at ``scale``."""
        return cls(loss_scale=scale, loss_scale_first=scale, loss_scale_min=scale, loss_scale_max=scale)

    def after_step(self, used_scale: float, next_scale: float, report: StepReport) -> PrecisionStats:
        """The stats with one more step, which ran at ``used_scale``."""
        largest = None if report.overflow else report.largest_gradient
        return replace(
            self,
            steps=self.steps + 1,
            skipped_steps=self.skipped_steps + report.overflow,
            loss_scale=next_scale,
            loss_scale_min=min(self.loss_scale_min, used_scale),
            loss_scale_max=max(self.loss_scale_max, used_scale),
            headroom=headroom_left(next_scale, largest) if largest else self.headroom,  # none for gradients of zero
        )


class Observer(Protocol):
    """Looks on while an attached model trains (:mod:`hf_mp.diagnostics`); see ``MixedPrecision.observers``."""

    def forward_begins(
        self, forward: AttachedForward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[Any], None]:
        """A forward with grad begins; returns what is called with its outputs."""

    def backward_ended(self, largest: Tensor) -> None:
        """A backward's gradients were measured: their largest magnitude, not read yet. Only where a scale is."""

    def step_ended(self, report: StepReport) -> None:
        """An optimizer step was taken or skipped; the scaler has not counted it yet."""

    def last_words(self) -> str:
        """What to add to the message of a :class:`LossScaleError`."""

    def forget(self) -> None:
        """The model is detached."""


class MixedPrecision:
    """Mixed precision for one model and its optimizers: autocast, FP32 masters, loss scaling.

    Default layout of a policy: the model's parameters become (or are) the FP32 master weights; autocast reads FP16/BF16
    working copies of them; when ``backward()`` returns, ``.grad`` is FP32 and unscaled; ``optimizer.step()`` is skipped
    when a gradient is inf or NaN, or so large (2**64) that its square is. Micikevicius et al. 2017 (arXiv 1710.03740),
    section 3.

    Args:
        policy: a :class:`PrecisionPolicy` or what :meth:`PrecisionPolicy.parse` takes; default ``"fp16"``.
        loss_scaler: the scaler to use instead of the one that the policy names.
        tables: as for :class:`hf_mp.autocast`; default ``"compact"``: torch's lists for CUDA, and no FP32 copies where
            a kernel computes in FP32 registers anyway. ``"cuda"`` and ``"cpu"`` are torch's lists to the letter.
        rules: as for :class:`hf_mp.autocast`; module names are those of the attached model; default none.
        free_gradients: when the lean layouts free a gradient: ``"step"`` (default), when the update has used it, or
            ``"backward"``: parameters are updated inside of ``backward()``, and never more than one gradient is there
            (:mod:`hf_mp.weights.optimizer_in_backward`). ``optimizer.step()`` then only closes the step.
        max_grad_norm: for ``free_gradients="backward"``: clip to this global 2-norm, which whoever clips after
            backward cannot do any more; ``inf`` only measures it. Default None: neither. With it, and where the loss
            is scaled, the backward runs twice.

    Attributes:
        policy: the :class:`PrecisionPolicy`.
        scaler: the loss scaler.
        stats: the :class:`PrecisionStats` of the steps so far.
        step_was_skipped: whether the last optimizer step was skipped for an overflow.

    Raises:
        TypeError: for a policy that is neither text nor a :class:`PrecisionPolicy`.
        ValueError: for an unknown policy, ``free_gradients="backward"`` outside of the lean layouts, or
            ``max_grad_norm`` without it.
    """

    def __init__(
        self,
        policy: PrecisionPolicy | str = "fp16",
        *,
        loss_scaler: LossScaler[Any] | None = None,
        tables: TableName = "compact",
        rules: Rules | None = None,
        free_gradients: FreeGradients = "step",
        max_grad_norm: float | None = None,
    ) -> None:
        self.policy = PrecisionPolicy.parse(policy)
        check_free_gradients(self.policy, free_gradients, max_grad_norm)
        self.scaler = loss_scaler if loss_scaler is not None else make_loss_scaler(self.policy.loss_scale)
        self.working_copies = WorkingCopies(self.policy.compute)
        self._tables: TableName = tables
        self._rules = rules
        self.region = self._make_region(None)
        self.step_was_skipped = False
        self.detached = False
        self.stats = PrecisionStats.before_first_step(self.scaler.get_scale())
        self._model: weakref.ref[nn.Module] | None = None
        self._wrapped: list[weakref.ref[nn.Module]] = []
        self._guards: list[StepGuard] = []
        self._ranks = Ranks()
        self._largest: Tensor | None = None  # of the unscaled gradients since the last step
        self._measured = Measured()
        self.measures_norm = False  # set by who clips with gradient_norm()
        self._graph_task: int | None = None
        self._warned_unguarded = False
        self.observers: list[Observer] = []
        self.optimizer_in_backward: OptimizerInBackward | None = None
        if free_gradients == "backward":
            self.optimizer_in_backward = OptimizerInBackward(
                max_grad_norm, lambda: self._is_scaled, self._tell_measured
            )

    def _inverse_scale(self, device: torch.device) -> Tensor | None:
        return self.scaler.factors(device).inverse

    def _make_region(self, model: nn.Module | None) -> Region:
        by_module = any(isinstance(key, str) for key in self._rules or {})
        rules = None if model is None and by_module else self._rules
        return Region(self.policy, self.scaler, self.working_copies, tables=self._tables, rules=rules, model=model)

    @property
    def was_attached(self) -> bool:
        """Whether a model is attached, also one that is gone by now."""
        return self._model is not None

    @property
    def model(self) -> nn.Module | None:
        """The attached model; None where none is, or where it is gone."""
        return None if self._model is None else self._model()

    def attach(self, model: nn.Module) -> nn.Module:
        """Run ``model`` under this policy from now on; returns the same model.

        Trainable FP16/BF16 parameters are cast to FP32 in place (the Parameter objects stay, so an optimizer made
        before keeps working); frozen ones stay as they are. Attach before the optimizer's first step. A policy of
        FP32 changes nothing.

        Lean layouts: trainable parameters become :class:`SplitParameter`, in FP16/BF16, with their FP32 value kept in
        16 bits more. ``state_dict()`` and ``save_pretrained()`` of the model give FP32 values all the same.

        Raises:
            ValueError: if the model has no floating parameter, is attached already, is wrapped for ``DataParallel``,
                or has trainable parameters in TorchScript where the loss is scaled.
        """
        if not self.policy.is_mixed:
            return model
        if self.model is not None:
            raise ValueError("this MixedPrecision has a model already: detach() it, or make another one")
        check_attachable(model)
        if self.policy.is_lean and isinstance(model, DistributedDataParallel):
            raise ValueError(
                f"precision={str(self.policy)!r} leaves 16-bit gradients, which DistributedDataParallel would sum: use "
                f"{str(self.policy).removesuffix('-lean')!r} on several processes"
            )
        if isinstance(self.scaler.factors(torch.device("cpu")), ScaleTensors):
            check_reachable(model)
        self.region = self._make_region(model)
        self._model = weakref.ref(model)
        self.detached = False
        self._make_masters(model)
        self.wrap_forwards()
        install_causal_lm_loss(model)
        if self._tables == "compact":
            install_activations(model)
        return model

    def _make_masters(self, model: nn.Module) -> None:
        if self.policy.is_lean:
            if split_trainable_parameters(model, self.policy.params, self._inverse_scale):
                self.working_copies.clear()  # of what was frozen before
        else:
            _make_masters(model)

    def wrap_forwards(self) -> None:
        """Put the attached forward (again) wherever it is missing: a library may have set one of its own."""
        model = self.model
        for module in [] if model is None else _entry_points(model):
            if not isinstance(module.__dict__.get("forward"), AttachedForward):
                module.forward = self.attached_forward(module)

    def attached_forward(self, module: nn.Module) -> AttachedForward:
        """The forward that ``module`` has while attached."""
        original = module.__dict__.get("forward", None)
        if original is None or isinstance(original, AttachedForward):
            original = class_forward(module)
        self._wrapped.append(weakref.ref(module))
        return AttachedForward(self, module, original)

    def attach_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Guard ``optimizer.step()``: skip it when a gradient is inf or NaN, or 2**64 or larger.

        FP32 cannot hold the square of such a one, and Adam's second moment would stay inf for good.

        A guarded optimizer is not guarded twice.

        Returns:
            The same optimizer; in the lean layouts a :class:`MasterWeightOptimizer` around it, to be used from now on.

        Raises:
            TypeError: for anything but one optimizer.
            ValueError: if no model is attached, for an optimizer of another model's parameters, or for one that cannot
                step without a closure (LBFGS).
        """
        if not self.policy.is_mixed:
            return optimizer
        if self._model is None:
            raise ValueError("attach a model before its optimizer: MixedPrecision(...).attach(model)")
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"attach_optimizer takes one torch optimizer, not {type(optimizer).__name__}: call it once for each"
            )
        if _needs_closure(optimizer):
            raise ValueError(
                f"{type(optimizer).__name__} calls its closure several times in a step, and what overflowed in one of "
                "them cannot be skipped: use an optimizer whose step() works without a closure, or precision='fp32'"
            )
        model = self.model
        if model is not None and not _share_parameters(model, optimizer):
            raise ValueError(
                f"no parameter of this {type(optimizer).__name__} belongs to the attached {type(model).__name__}: make "
                "the optimizer from model.parameters()"
            )
        if self.policy.is_lean and not isinstance(optimizer, MasterWeightOptimizer):
            optimizer = MasterWeightOptimizer(optimizer, layout="split")
        state_to_fp32(optimizer)
        if self.optimizer_in_backward is not None and isinstance(optimizer, MasterWeightOptimizer):
            self.optimizer_in_backward.take_optimizer(optimizer)
        if not any(guard.optimizer is optimizer for guard in self._guards):
            self._guards.append(StepGuard(self, optimizer))
        return optimizer

    def detach(self) -> None:
        """Leave the model as an ordinary FP32 model and its optimizers as they were: no hook, wrapper or copy stays."""
        for reference in self._wrapped:
            module = reference()
            forward = None if module is None else module.__dict__.get("forward")
            if module is not None and isinstance(forward, AttachedForward):
                _restore_forward(module, forward.original)
        self._wrapped.clear()
        for guard in self._guards:
            guard.remove()
        self._guards.clear()
        self.working_copies.clear()
        if self.optimizer_in_backward is not None:
            self.optimizer_in_backward.forget()
        if (model := self.model) is not None:
            restore_parameters(model)
            remove_causal_lm_loss(model)
            remove_activations(model)
        self._model = None
        for observer in self.observers:
            observer.forget()
        self.detached = True

    def copy_for(self, memo: dict[int, Any]) -> MixedPrecision:
        """The runtime of a deep copy of the model: same policy and scale, own working copies, no optimizer."""
        if id(self) not in memo:
            copied = MixedPrecision(self.policy, loss_scaler=self.scaler.copy(), tables=self._tables, rules=self._rules)
            memo[id(self)] = copied
            if (model := self.model) is not None and id(model) in memo:
                copied._model = weakref.ref(memo[id(model)])
                copied.region = copied._make_region(memo[id(model)])
        return memo[id(self)]

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs besides model and optimizer, as plain values for JSON."""
        return {"version": 1, "precision": str(self.policy), "loss_scaler": self.scaler.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state that :meth:`state_dict` gave; one of another loss scaling only warns and is left.

        Raises:
            TypeError: for anything but a mapping.
            ValueError: for another version, or the state of another kind of scaler.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"a mixed precision state is a mapping, not a {type(state_dict).__name__}")
        if state_dict.get("version") != 1 or "loss_scaler" not in state_dict:
            raise ValueError(
                f"not a mixed precision state of version 1: version={state_dict.get('version')!r}, "
                f"keys {sorted(state_dict, key=str)}"
            )
        saved = PrecisionPolicy.parse(str(state_dict.get("precision", self.policy)))
        if saved.loss_scale != self.policy.loss_scale:
            was, now = saved.loss_scale or "none", self.policy.loss_scale or "none"
            warnings.warn(
                f"loss_scale was {was} in the saved run, and is {now} here: the loss scale starts anew",
                stacklevel=2,
            )
            return
        self.scaler.load_state_dict(state_dict["loss_scaler"])
        self.reset_stats()

    def reset_stats(self) -> None:
        """Begin the stats anew at what the scaler says, after it took a saved state over."""
        state = self.scaler.state
        self.stats = replace(
            PrecisionStats.before_first_step(state.scale), steps=state.steps, skipped_steps=state.skipped_steps
        )

    # What the borders ask for

    @torch.compiler.disable
    def before_forward(self) -> None:
        """Have the scale as a tensor where the model is, and masters for what was unfrozen meanwhile."""
        model = self.model
        if model is None:
            return
        if is_running():
            check_parallelism(model)  # DDP or FSDP may have come after attach()
            self._ranks.note_forward(model)
            if self.policy.is_lean and self._ranks.train_together:
                raise ValueError(
                    f"precision={str(self.policy)!r} leaves 16-bit gradients, which DistributedDataParallel would sum "
                    f"in 16 bits: use {str(self.policy).removesuffix('-lean')!r} on several processes"
                )
            if is_sharded(model):
                self.working_copies.keep_none()
        if (parameter := next(model.parameters(), None)) is not None:
            self.scaler.scale_tensors(parameter.device)
        if torch.is_grad_enabled():
            self._make_masters(model)
            if self.optimizer_in_backward is not None:
                self.optimizer_in_backward.watch(model.parameters())

    @torch.compiler.disable
    def observe_forward(
        self, forward: AttachedForward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Callable[[Any], None]]:
        """Tell the observers of a forward that builds a graph; gives what is to be called with its outputs."""
        if not torch.is_grad_enabled():
            return []
        return [observer.forward_begins(forward, args, kwargs) for observer in self.observers]

    @torch.compiler.disable
    def forward_ended(self, observed: list[Callable[[Any], None]], outputs: Any) -> None:
        """Give the outputs to whom :meth:`observe_forward` named."""
        for ended in observed:
            ended(outputs)

    @torch.compiler.disable
    def output_border(self, output: Tensor, *, may_defer: bool = False) -> Tensor:
        """The border that a tensor crosses on its way out of the model; large ones may be cast when they are read."""
        deferred = may_defer and output.numel() >= DEFERRED_ELEMENTS
        if self.optimizer_in_backward is not None:
            output = self.optimizer_in_backward.point(output)
        return output_border(output, self.scaler.factors(output.device).scale, self.backward_begins, deferred=deferred)

    @torch.compiler.disable
    def input_border(self, value: Tensor) -> Tensor:
        """The border that a tensor crosses on its way into the model."""
        return input_border(value, self.scaler.factors(value.device).inverse)

    def backward_begins(self) -> None:
        """Have the gradients measured when this backward is done, before anyone clips them."""
        task = torch._C._current_graph_task_id()
        if task != self._graph_task and (self._is_scaled or self.measures_norm):
            self._graph_task = task
            model = self.model
            if model is not None and not raw_gradients(model.parameters()):
                if self._largest is not None and not self._guards:
                    self._warn_unguarded()
                self._largest = None  # what was measured before was thrown away without a step
            # Two callbacks deep: the first of DDP's follow this one, and its all-reduce may write .grad till then.
            queue = torch.autograd.Variable._execution_engine.queue_callback
            queue(lambda: queue(self._measure_gradients))

    def _warn_unguarded(self) -> None:
        if not self._warned_unguarded:
            self._warned_unguarded = True
            warnings.warn(
                "this model is attached to a MixedPrecision that knows no optimizer of it: updates that overflow are "
                "not skipped, and the loss scale stands still. Call attach_optimizer(optimizer), or detach()",
                stacklevel=2,
            )

    def _measure_gradients(self) -> None:
        model = self.model
        parameters = [] if model is None else list(model.parameters())
        if self.working_copies.keeps_none:  # FSDP may leave whole parameters in the places of those with gradients
            shards = (p for guard in self._guards for group in guard.optimizer.param_groups for p in group["params"])
            parameters = list({id(p): p for p in (*parameters, *shards)}.values())
        if raw_gradients(parameters):  # none while FSDP accumulates without reducing them
            largest, self._measured = measure(parameters, with_norm=self.measures_norm)
            self._largest = largest if self._largest is None else torch.maximum(self._largest, largest)
            self._tell_measured(largest)

    def _tell_measured(self, largest: Tensor) -> None:
        for observer in self.observers:
            observer.backward_ended(largest)

    def gradient_norm(self, parameters: Sequence[nn.Parameter]) -> Tensor | None:
        """The global 2-norm of the gradients as the backward left them; None where it is not known (any more).

        Bit for bit that of ``torch.nn.utils.get_total_norm``, measured along with the largest magnitude while
        ``measures_norm`` is set.
        """
        return self._measured.norm if self._are_unchanged(parameters) and self._measured.is_all(parameters) else None

    def clip_gradients(self, parameters: Sequence[nn.Parameter], max_norm: float, norm: Tensor) -> None:
        """Scale the gradients down to ``max_norm``, as ``torch.nn.utils.clip_grads_with_norm_`` does.

        With a finite norm, what was finite stays so: the guard does not look at the gradients once more, as it does
        after other writes.

        Args:
            parameters: all that have gradients.
            max_norm: above 0.
            norm: what :meth:`gradient_norm` told.
        """
        if norm <= max_norm - 1e-5:  # the factor is 1: one pass over the gradients less
            return
        clip_grads_with_norm_(parameters, max_norm, norm)
        if norm.isfinite():  # others have become 0 or NaN
            self._measured = Measured(raw_gradients(parameters))

    def _are_unchanged(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether the gradients are those that were measured when the backward ended."""
        return self._ranks.gradients_are_final(parameters) and self._measured.still_covers(parameters)

    # What the guard does

    def report(self, optimizer: Optimizer) -> StepReport:
        """What the gradients of ``optimizer`` are like, on all ranks."""
        if self.optimizer_in_backward is not None and (used_up := self.optimizer_in_backward.report()) is not None:
            return used_up
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if any(is_dtensor(parameter) for parameter in parameters):
            self.working_copies.keep_none()  # also where FSDP shards a module around the model, unseen from inside
        measured = None if self._largest is None else self._largest.item()
        # In a loop of one's own, gradients may be written so that no version counter rises (`.data`, NumPy).
        seen = measured is not None and self.measures_norm and self._are_unchanged(parameters)
        # A gradient too large to be squared would make Adam's second moment inf for good.
        if measured is not None and seen:
            overflow = not measured < SQUARES_BELOW
        else:
            overflow = not all_finite(map(local_part, raw_gradients(parameters)), SQUARES_BELOW)
        # Clipping by value, or a repair by hand, may have hidden what the backward gave.
        overflow = overflow or (measured is not None and not math.isfinite(measured))
        # Without loss scaling there is no headroom to tell of.
        largest = measured if self._is_scaled and not overflow else None
        return self._ranks.agree(StepReport(overflow, largest), parameters)

    @property
    def _is_scaled(self) -> bool:
        return isinstance(self.scaler.factors(torch.device("cpu")), ScaleTensors)

    def step_fused(self, optimizer: Optimizer, own_step: Callable[..., Any] | None) -> bool:
        """Take the step of ``optimizer`` and refresh working copies in one kernel; False where there is none."""
        return step_whole(optimizer, own_step, self.working_copies)

    def parameters_changed(self, parameters: Iterable[nn.Parameter]) -> None:
        """Round the masters that an optimizer wrote into the working copies."""
        self.working_copies.refresh_all(parameters)

    def finish_step(self, report: StepReport) -> None:
        """Take in that a step was applied or skipped; sets the next loss scale."""
        self._largest, self._measured = None, Measured()
        if self.optimizer_in_backward is not None:
            self.optimizer_in_backward.finish_step()
        self.step_was_skipped = report.overflow
        if (model := self.model) is not None:
            keep_scale_of_gradients(model.parameters())
        used_scale = self.scaler.get_scale()
        for observer in self.observers:
            observer.step_ended(report)
        try:
            self.scaler.record_step(report, self._nonfinite_gradients)
        except LossScaleError as error:
            words = [words for observer in self.observers if (words := observer.last_words())]
            raise LossScaleError("\n".join([str(error), *words])) from None
        finally:
            self.stats = self.stats.after_step(used_scale, self.scaler.get_scale(), report)

    def _nonfinite_gradients(self) -> list[str]:
        model = self.model
        named = [] if model is None else model.named_parameters()
        largest = {name: largest_true_magnitude([parameter]).item() for name, parameter in named}
        return [
            f"{name} ({found:g} squared)" if math.isfinite(found) else name
            for name, found in largest.items()
            if not found < SQUARES_BELOW
        ]


def check_free_gradients(policy: PrecisionPolicy, free_gradients: str, max_grad_norm: float | None = None) -> None:
    """Raise where gradients cannot be freed as asked for.

    Raises:
        ValueError: naming the setting and the way out.
    """
    if free_gradients not in get_args(FreeGradients):
        allowed = ", ".join(map(repr, get_args(FreeGradients)))
        raise ValueError(f"free_gradients={free_gradients!r} is not known: use one of {allowed}")
    if free_gradients == "step" and max_grad_norm is not None:
        raise ValueError(
            f"max_grad_norm={max_grad_norm} is for free_gradients='backward': without it, clip before optimizer.step()"
        )
    if free_gradients == "backward" and not policy.is_lean:
        raise ValueError(
            f"free_gradients='backward' needs a lean layout, whose optimizer is ours, not precision={str(policy)!r}: "
            "use 'fp16-lean' or 'bf16-lean'"
        )
    if max_grad_norm is not None and not max_grad_norm > 0.0:
        raise ValueError(f"max_grad_norm={max_grad_norm} must be positive; None for no clipping, inf to measure only")


def check_attachable(model: nn.Module) -> None:
    """Raise where mixed precision cannot be attached to ``model``.

    Raises:
        ValueError: if the model has no floating parameter, is attached already, is wrapped in ``DataParallel``, or is
            spread over processes in a way that :func:`hf_mp.weights.distributed.check_parallelism` refuses.
    """
    if isinstance(model, nn.DataParallel):
        raise ValueError("DataParallel replicates a model behind our back: use DistributedDataParallel (torchrun)")
    if not any(parameter.is_floating_point() for parameter in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} has no floating parameters, so there is nothing to train in mixed precision"
        )
    check_parallelism(model)
    if any(isinstance(module.__dict__.get("forward"), AttachedForward) for module in model.modules()):
        raise ValueError(f"this {type(model).__name__} is attached to a MixedPrecision already: detach() that first")


def prepare(
    model: nn.Module, optimizer: Optimizer, precision: PrecisionPolicy | str = "fp16", **settings: Any
) -> tuple[nn.Module, Optimizer]:
    """Mixed precision for a loop of one's own: attach a policy to a model and its optimizer.

    The loop stays as it is for FP32: ``loss.backward()``, clip, ``optimizer.step()``, ``optimizer.zero_grad()``. An LR
    scheduler that is to stand still with a skipped update asks ``optimizer.step_was_skipped``. What a step does
    is in section 3 of Micikevicius et al. 2017 (arXiv 1710.03740).

    Args:
        model: any ``nn.Module``; one loaded in FP16/BF16 is given FP32 masters.
        optimizer: over parameters of ``model``; state that it has already, made by its constructor or loaded, is cast
            to FP32.
        precision: ``"fp16"`` (default), ``"bf16"``, ``"fp16-lean"``, ``"bf16-lean"``, ``"fp32"`` (nothing is changed)
            or a :class:`PrecisionPolicy`.
        settings: as for :class:`MixedPrecision`: ``loss_scaler``, ``tables``, ``rules``, ``free_gradients``.

    Returns:
        The same model, and the optimizer to use from now on: the same one, whose ``step`` skips updates that
        overflowed, or in the lean layouts a :class:`MasterWeightOptimizer` around it.

    Raises:
        TypeError: for anything but a module and an optimizer.
        ValueError: for an unknown precision, a model that cannot be attached, or an optimizer of another model.
    """
    if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"prepare takes a model and its optimizer, not {type(model).__name__} and {type(optimizer).__name__}; "
            "several optimizers: MixedPrecision(...).attach(model), then attach_optimizer(optimizer) for each"
        )
    runtime = MixedPrecision(precision, **settings)
    return runtime.attach(model), runtime.attach_optimizer(optimizer)


def _share_parameters(model: nn.Module, optimizer: Optimizer) -> bool:
    own = {id(parameter) for parameter in model.parameters()}
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # FSDP puts shards in the places of parameters, in the model or in the optimizer first.
    return any(id(parameter) in own or is_dtensor(parameter) for parameter in given)


def _needs_closure(optimizer: Optimizer) -> bool:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


@torch.no_grad()
def _make_masters(model: nn.Module) -> None:
    converted = False
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype in LOWER_PRECISION_DTYPES:
            parameter.data = parameter.data.float()
            converted = True
    if converted:  # running statistics of a model loaded in FP16 would swamp their updates, as weights would
        for buffer in model.buffers():
            if buffer.dtype in LOWER_PRECISION_DTYPES:
                buffer.data = buffer.data.float()


def _entry_points(model: nn.Module) -> list[nn.Module]:
    """The modules whose call enters the region: the model, and Transformers models inside it.

    PEFT calls the model that it wraps directly in ``generate``, and people call ``model.base_model``.
    """
    transformers_models = sys.modules.get("transformers.modeling_utils")
    if transformers_models is None:
        return [model]
    inner = [m for m in model.modules() if m is not model and isinstance(m, transformers_models.PreTrainedModel)]
    return [model, *inner]


def _restore_forward(module: nn.Module, original: Callable[..., Any]) -> None:
    del module.forward
    if getattr(original, "__func__", None) is not type(module).forward:
        module.forward = original
