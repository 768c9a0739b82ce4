"""``MixedPrecision``: attaches a precision policy to a model and its optimizers, and detaches it again."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hf_mp.casting.replacements import install_replacements, remove_replacements
from hf_mp.casting.replacements.base import class_forward
from hf_mp.casting.rules import Rules
from hf_mp.casting.tables import TableName
from hf_mp.casting.torch_patches import PATCHES
from hf_mp.policy import PrecisionPolicy
from hf_mp.scaling.events import PrecisionStats, StepObserver
from hf_mp.scaling.multiply import accumulates
from hf_mp.scaling.rules import StepReport
from hf_mp.scaling.scalers import LossScaleError, LossScaler, make_loss_scaler
from hf_mp.step.forward import AttachedForward, Region, RegionOfUses, WorkingWeights
from hf_mp.step.gradients import GradientCheck
from hf_mp.step.update import StepGuard, guard_of
from hf_mp.weights.attachable import check_attachable, check_layout, check_optimizer
from hf_mp.weights.distributed import Ranks, check_parallelism, is_running
from hf_mp.weights.early_state import state_to_fp32
from hf_mp.weights.layout import make_layout
from hf_mp.weights.optimizer_in_backward import FreeGradients, OptimizerInBackward, check_free_gradients


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
            ``"backward"``: parameters are updated inside of ``backward()``
            (:mod:`hf_mp.weights.optimizer_in_backward`). ``optimizer.step()`` then only closes the step.
        max_grad_norm: for ``free_gradients="backward"``: clip to this global 2-norm; ``inf`` only measures it. Default
            None: neither. With it, and where the loss is scaled, the backward runs twice.

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
        self.layout = make_layout(self.policy)
        self._ranks = Ranks()
        self.check = GradientCheck(self._ranks, self._backward_ended)
        self._tables: TableName = tables
        self._rules = rules
        self.region = self._make_region(None)
        self.step_was_skipped = self.is_detached = False
        self.stats = PrecisionStats.before_first_step(self.scaler.get_scale())
        self._model: weakref.ref[nn.Module] | None = None
        self._patches: weakref.finalize[..., nn.Module] | None = None
        self._wrapped: list[weakref.ref[nn.Module]] = []
        self._guards: list[StepGuard] = []
        self.observers: list[StepObserver] = []
        self.in_backward: OptimizerInBackward | None = None
        if free_gradients == "backward":
            self.in_backward = OptimizerInBackward(max_grad_norm, self._backward_ended)
            self.observers.append(self.in_backward)

    def _make_region(self, model: nn.Module | None) -> Region:
        by_module = any(isinstance(key, str) for key in self._rules or {})
        rules = None if model is None and by_module else self._rules
        kind = RegionOfUses if self.layout.takes_gradients else Region
        return kind(self, tables=self._tables, rules=rules, model=model)

    @property
    def was_attached(self) -> bool:
        """Whether a model is attached, also one that is gone by now."""
        return self._model is not None

    @property
    def model(self) -> nn.Module | None:
        """The attached model; None where none is, or where it is gone."""
        return None if self._model is None else self._model()

    # Attach

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
        check_layout(model, self.policy, is_scaled=self.scaler.is_scaling)
        self._take_model(model)
        self.layout.prepare(model)
        self.wrap_forwards()
        install_replacements(model, self._tables)
        return model

    def _take_model(self, model: nn.Module) -> None:
        self._model, self.is_detached = weakref.ref(model), False
        self.region = self._make_region(model)
        self.check.layout, self.check.is_scaled = self.layout, self.scaler.is_scaling
        self.check.parameters = self._trained_parameters
        PATCHES.acquire()
        self._patches = weakref.finalize(model, PATCHES.release)

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
        check_optimizer(optimizer, self.model)
        optimizer = self.layout.wrap(optimizer)
        state_to_fp32(optimizer)
        if self.in_backward is not None:
            self.in_backward.take_optimizer(optimizer)
        guard = guard_of(optimizer) or StepGuard(optimizer)
        guard.watch(self)
        if guard not in self._guards:
            self._guards.append(guard)
        return optimizer

    # Forward

    @torch.compiler.disable
    def begin_forward(self) -> WorkingWeights | None:
        """The weights of a forward that is about to run, which FP32 masters are made for; None without grad."""
        model = self.model
        if model is None:
            return None
        if is_running():
            self._ranks.note_forward(model)
            check_parallelism(model)  # DDP or FSDP may have come after attach()
            self._use_layout_for(model.parameters())
        if (parameter := next(model.parameters(), None)) is not None:
            self.scaler.scale_tensors(parameter.device)
        if not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
            return None
        if torch._C._current_graph_task_id() == -1:  # after a backward that an exception ended
            self.check.runs = False
        self.layout.prepare(model)
        return WorkingWeights(self, model)

    @torch.compiler.disable
    def observe_forward(
        self, forward: AttachedForward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Callable[[Any], None]]:
        """Tell the observers of a forward; gives what is to be called with its outputs."""
        takers = [observer.forward(forward, args, kwargs) for observer in self.observers]
        return [taker for taker in takers if taker is not None]

    def _use_layout_for(self, parameters: Iterable[Tensor]) -> None:
        before = self.layout
        self.layout = before.for_parameters(parameters, train_together=self._ranks.train_together)
        if self.layout is not before:
            before.copies.clear()
            self.check.layout = self.layout

    def _trained_parameters(self) -> list[nn.Parameter]:
        """The parameters whose gradients a backward may leave, each once."""
        found = [] if self.model is None else list(self.model.parameters())
        if self.layout.keeps_copies:
            return found
        # FSDP may leave whole parameters in the places of the shards, which have the gradients.
        given = [p for guard in self._guards for group in guard.optimizer.param_groups for p in group["params"]]
        return list({id(parameter): parameter for parameter in (*found, *given)}.values())

    # Backward: what the borders ask (hf_mp.scaling.multiply.Crossings)

    def scale(self, device: torch.device) -> Tensor | None:
        return self.scaler.scale_tensors(device).scale if self.check.is_scaled else None

    def inverse(self, device: torch.device, node: Any, index: int) -> Tensor | None:
        if not self.check.is_scaled:
            return None
        if self.check.runs:
            return self.scaler.scale_tensors(device).inverse
        if accumulates(node, index):
            self.check.warn_of_leak()
        return None

    def entered(self, node: Any, gradient: Tensor) -> None:
        self.check.backward_began()
        for observer in self.observers:
            observer.backward_began(node, gradient)

    def take(self, weight: Tensor, gradients: Sequence[Tensor], node: Any, index: int) -> bool:
        if not self.layout.takes_gradients or not accumulates(node, index):
            return False
        return self.layout.take_gradient(weight, gradients, self.inverse(weight.device, node, index))

    def _backward_ended(self, largest: Tensor | None) -> None:
        for observer in self.observers:
            observer.backward_ended(largest)

    # Step: what the guard asks

    def report(self, optimizer: Optimizer) -> StepReport:
        """What the gradients of ``optimizer`` are like."""
        for observer in self.observers:
            if (report := observer.report()) is not None:
                return report
        if is_running():  # FSDP may shard a module around the model, unseen from inside
            self._use_layout_for(parameter for group in optimizer.param_groups for parameter in group["params"])
        return self.check.report(optimizer)

    def update(self, optimizer: Optimizer, own_step: Callable[..., Any] | None) -> bool:
        """Take the step of ``optimizer`` and refresh working copies in one kernel; False where there is none."""
        return self.layout.step(optimizer, own_step)

    def updated(self, optimizer: Optimizer) -> None:
        """``optimizer`` has written its parameters: refresh working copies."""
        self.layout.updated(optimizer)

    def finish_step(self, report: StepReport, *, was_skipped: bool) -> None:
        """Take in that a step was applied or skipped; sets the next loss scale."""
        self.check.forget()
        self.step_was_skipped = was_skipped
        self.layout.scale_changes(self.check.parameters())
        used_scale = self.scaler.get_scale()
        for observer in self.observers:
            observer.stepped(report)
        try:
            self.scaler.record_step(report, self._culprits)
        except LossScaleError as error:
            words = [words for observer in self.observers if (words := observer.last_words())]
            raise LossScaleError("\n".join([str(error), *words])) from None
        finally:
            self.stats = self.stats.after_step(used_scale, self.scaler.get_scale(), report)

    def _culprits(self) -> list[str]:
        return [] if self.model is None else self.check.culprits(self.model.named_parameters())

    # Detach

    def detach(self) -> None:
        """Leave the model as an ordinary FP32 model and its optimizers as they were: no hook, wrapper or copy stays."""
        for reference in self._wrapped:
            module = reference()
            forward = None if module is None else module.__dict__.get("forward")
            if module is not None and isinstance(forward, AttachedForward):
                _restore_forward(module, forward.original)
        self._wrapped.clear()
        for guard in self._guards:
            guard.remove(self)
        self._guards.clear()
        model, self._model = self.model, None
        self.layout.restore(model)
        if model is not None:
            remove_replacements(model)
        for observer in self.observers:
            observer.detached()
        if self._patches is not None:
            self._patches()
        self.is_detached = True

    def copy_for(self, memo: dict[int, Any]) -> MixedPrecision:
        """The runtime of a deep copy of the model: same policy and scale, own working copies, no optimizer."""
        if id(self) not in memo:
            copied = MixedPrecision(self.policy, loss_scaler=self.scaler.copy(), tables=self._tables, rules=self._rules)
            memo[id(self)] = copied
            if (model := self.model) is not None and id(model) in memo:
                copied._take_model(memo[id(model)])
        return memo[id(self)]

    # State

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


def prepare(
    model: nn.Module, optimizer: Optimizer, precision: PrecisionPolicy | str = "fp16", **settings: Any
) -> tuple[nn.Module, Optimizer]:
    """Mixed precision for a loop of one's own: attach a policy to a model and its optimizer.

    The loop stays as it is for FP32: ``loss.backward()``, clip, ``optimizer.step()``, ``optimizer.zero_grad()``. An LR
    scheduler that is to stand still with a skipped update asks ``optimizer.step_was_skipped``. What a step does
    is in section 3 of Micikevicius et al. 2017 (arXiv 1710.03740).

    Args:
        model: any ``nn.Module``; one loaded in FP16/BF16 is given FP32 masters.
        optimizer: over parameters of ``model``, not stepped yet.
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
